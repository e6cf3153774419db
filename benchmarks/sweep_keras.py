"""Every layer, loss, activation and function with a gradient in Keras and TensorFlow, at generic and special points.

    python benchmarks/sweep_keras.py run sweep.jsonl        # resumes where it stopped; about 20 minutes
    python benchmarks/sweep_keras.py page sweep.jsonl       # writes docs/library-gradients.md

Functions are judged here by an independent slow version of the check: eager backpropagation in float64 against left and
right difference quotients of every entry. Layers and losses go through ``check_layer``. What is wrong, NaN or missing
is confirmed by hand, in ``sweep_cases.CONFIRMED``, with a closed form or SciPy.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import sweep_cases as cases
import tensorflow as tf

warnings.filterwarnings("ignore")
ROOT = Path(__file__).parent.parent
STEP = 1e-6


def scalar_of(f: Callable[..., Any], arguments: list[Any], pick: int | None) -> Any:
    """Σ cᵢ yᵢ over all float results with fixed positive c, or one result alone."""
    parts = []
    for y in tf.nest.flatten(f(*arguments)):
        y = tf.convert_to_tensor(y)
        if y.dtype.is_complex:
            parts += [tf.reshape(tf.math.real(y), [-1]), tf.reshape(tf.math.imag(y), [-1])]
        elif y.dtype.is_floating:
            parts.append(tf.reshape(tf.cast(y, tf.float64), [-1]))
    if not parts:
        raise TypeError("no float result")
    flat = tf.concat([tf.cast(p, tf.float64) for p in parts], 0)
    if pick is not None:
        return flat[pick], int(flat.shape[0])
    weights = np.random.default_rng(5).uniform(0.5, 1.5, int(flat.shape[0]))
    return tf.reduce_sum(flat * weights), int(flat.shape[0])


def judge(f: Callable[..., Any], arrays: list[np.ndarray], k: int) -> tuple[str, str]:
    """Verdict on the gradient by argument ``k``, and the worst entry in words."""
    verdict, words, results = _judged(f, arrays, k, None)
    if verdict == "wrong" and 1 < results <= 64:
        # Kinks of several results need not add up to an interval: each result must be wrong for itself.
        single = [_judged(f, arrays, k, i)[:2] for i in range(results)]
        wrong = [s for s in single if s[0] == "wrong"]
        verdict, words = wrong[0] if wrong else ("kink", "")
    if verdict == "wrong" and _is_limit_nearby(f, arrays, k):
        return "kink", ""  # ties of several results: one of the gradients that hold all around
    return verdict, words


def _is_limit_nearby(f: Callable[..., Any], arrays: list[np.ndarray], k: int) -> bool:
    """Does every entry of the gradient lie between those of points all around, which are right there?"""
    gradients = []
    for seed in range(12):
        jitter = 0.0 if not seed else 1e-5 * np.random.default_rng(seed).standard_normal(arrays[k].shape)
        moved = [*arrays[:k], arrays[k] + jitter, *arrays[k + 1 :]]
        if seed and _judged(f, moved, k, None)[0] == "wrong":
            return False
        tensor = tf.constant(moved[k])
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            value, _ = scalar_of(f, [*map(tf.constant, moved[:k]), tensor, *map(tf.constant, moved[k + 1 :])], None)
        gradients.append(np.asarray(tf.convert_to_tensor(tape.gradient(value, tensor))))
    low, high = np.min(gradients[1:], axis=0) - 1e-3, np.max(gradients[1:], axis=0) + 1e-3
    spread = float(np.max(high - low))
    return spread > 0.05 and bool(np.all((gradients[0] >= low) & (gradients[0] <= high)))


def _judged(f: Callable[..., Any], arrays: list[np.ndarray], k: int, pick: int | None) -> tuple[str, str, int]:
    tensors = [tf.constant(a) for a in arrays]
    with tf.GradientTape() as tape:
        tape.watch(tensors[k])
        value, results = scalar_of(f, tensors, pick)
    if not np.isfinite(float(value)):
        return "undefined", "", results
    try:
        gradient = tape.gradient(value, tensors[k])
    except (LookupError, tf.errors.OpError) as error:
        return "missing", f"x = {arrays[k].tolist()!r}: {str(error).splitlines()[0].rpartition('}} ')[2][:90]}", results
    base = arrays[k].reshape(-1)
    given = np.full(base.size, np.nan) if gradient is None else np.asarray(tf.convert_to_tensor(gradient)).reshape(-1)
    verdicts = []
    for i in range(base.size):
        slopes = [_slopes(f, arrays, k, i, step, float(value), pick) for step in (STEP, STEP / 16)]
        verdicts.append((*_entry(None if gradient is None else float(given[i]), slopes, float(value)), i))
    order = ("wrong", "nan", "missing", "kink", "ok", "undefined")
    verdict, words, i = min(verdicts, key=lambda v: order.index(v[0]))
    place = f"x = {arrays[k].tolist()!r}, entry {i}: {words}" if words else ""
    return verdict, place, results


def _slopes(
    f: Any, arrays: list[np.ndarray], k: int, i: int, step: float, base: float, pick: Any
) -> tuple[float, float]:
    found = []
    for sign in (-1.0, 1.0):
        moved = arrays[k].copy()
        h = step * min(max(1.0, abs(moved.flat[i])), 1e3) * sign
        before = moved.flat[i]
        moved.flat[i] += h
        h = moved.flat[i] - before
        try:
            value = float(scalar_of(f, [*map(tf.constant, arrays[:k]), tf.constant(moved),
                                        *map(tf.constant, arrays[k + 1 :])], pick)[0])  # fmt: skip
        except tf.errors.OpError:
            value = np.nan
        found.append((value - base) / h)
    return found[0], found[1]


def _entry(given: float | None, slopes: list[tuple[float, float]], value: float) -> tuple[str, str]:
    """Verdict on one entry: its gradient against left and right slope, at two steps."""
    sides = []
    for side in (0, 1):
        long, short = slopes[0][side], slopes[1][side]
        steep = np.isfinite(long) and abs(short) > 2.5 * abs(long) and abs(short) > 1e2
        sides.append(np.inf if steep else long if np.isfinite(long) else np.nan)
    known = [s for s in sides if np.isfinite(s)]
    if given is None:
        flat = all(abs(s) < 1e-6 * max(1.0, abs(value)) for s in known)
        return ("ok", "") if flat else ("missing", f"no gradient, slope {known[0]:.6g}")
    if not known:
        return "undefined", ""
    if not np.isfinite(given):
        if len(known) < 2:
            return "kink", ""  # an end of the domain, or an infinite slope
        return "nan", f"gradient {given}, slope {np.mean(known):.6g}"
    tolerance = 2e-4 * max(1e-2, *map(abs, known)) + 64 * 2.2e-16 * abs(value) / (STEP / 16)
    low, high = min(known) - tolerance, max(known) + tolerance
    if low <= given <= high:
        return ("ok" if len(known) == 2 and high - low <= 4 * tolerance else "kink"), ""
    if len(known) < 2:
        return "kink", ""
    return "wrong", f"gradient {given:.6g}, slopes {known[0]:.6g} and {known[1]:.6g}"


def function_rows(module: str, name: str) -> Iterator[dict[str, str]]:
    """One row per argument and point of a function."""
    f = getattr(cases.MODULES[module], name)
    calls = cases.calls_of(module, name, f)
    if isinstance(calls, str):
        yield {"point": "", "verdict": "left out", "words": calls}
        return
    for label, call, points in calls:
        for point, arrays in points:
            for k, array in enumerate(arrays):
                if array.dtype.kind != "f":
                    continue
                try:
                    verdict, words = judge(call, arrays, k)
                except Exception as error:  # noqa: BLE001  what cannot be called is told, not hidden
                    verdict, words = "error", f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
                    verdict, words = ("undefined", "") if "not invertible" in words else (verdict, words)
                yield {"point": f"{label}{point}, argument {k}", "verdict": verdict, "words": words}


def layer_rows(name: str) -> Iterator[dict[str, str]]:
    """A layer by ``check_layer``, on data of several kinds."""
    from keras_gradwatch import check_layer

    recipe = cases.LAYERS.get(name)
    if recipe is None or isinstance(recipe, str):
        yield {"point": "", "verdict": "left out", "words": recipe or "NO RECIPE"}
        return
    make, inputs = recipe
    for point, data in cases.data_of(inputs):
        keras.utils.set_random_seed(1)
        try:
            report = check_layer(make(), data)
            worst = report.verdict
            words = "" if report.ok else "; ".join(
                f"{c.tensor}: {c.verdict} {c.reason}" for c in report.result.checks if c.verdict == worst
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001
            worst, words = "error", f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
        yield {"point": point, "verdict": worst, "words": words}


def everything() -> Iterator[tuple[str, Callable[[], Iterator[dict[str, str]]]]]:
    """Names of all cases, and what makes their rows."""
    for module in cases.MODULES:
        for name in cases.names_of(module):
            yield f"{module}.{name}", lambda module=module, name=name: function_rows(module, name)
    for name in cases.losses():
        yield f"keras.losses.{name}", lambda name=name: loss_rows(name)
    for name in cases.layers():
        yield f"keras.layers.{name}", lambda name=name: layer_rows(name)


def loss_rows(name: str) -> Iterator[dict[str, str]]:
    """A loss as a function of its predictions."""
    recipe = cases.LOSSES.get(name)
    if recipe is None or isinstance(recipe, str):
        yield {"point": "", "verdict": "left out", "words": recipe or "NO RECIPE"}
        return
    make, points = recipe
    for point, (y, p) in points.items():
        loss = make()
        loss._dtype = "float64"
        keras.config.set_floatx("float64")
        try:
            verdict, words = judge(lambda p, loss=loss, y=y: loss(tf.constant(y), p), [np.asarray(p, float)], 0)
        except Exception as error:  # noqa: BLE001
            verdict, words = "error", f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
        finally:
            keras.config.set_floatx("float32")
        yield {"point": point, "verdict": verdict, "words": words}


def run(path: Path, wanted: str) -> None:
    """Append a line per case that is not there yet."""
    known = {json.loads(line)["name"] for line in path.read_text().splitlines()} if path.exists() else set()
    with path.open("a") as file:
        for name, rows in everything():
            if name in known or not re.search(wanted, name):
                continue
            found = list(rows())
            file.write(json.dumps({"name": name, "rows": found}) + "\n")
            file.flush()
            counts = Counter(row["verdict"] for row in found)
            print(name, dict(counts), flush=True)


def page(path: Path) -> None:
    """Write the page of results."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    confirmed = {key: check() for key, check in cases.CONFIRMED.items()}
    bad = ("wrong", "nan", "missing", "mismatch", "nonfinite", "disconnected")
    rows = [(case["name"], row) for case in lines for row in case["rows"]]
    total = Counter(row["verdict"] for _, row in rows)
    faults: dict[str, list[dict[str, str]]] = defaultdict(list)
    for name, row in rows:
        if row["verdict"] in bad:
            faults[name].append(row)
    text = [cases.PAGE.format(keras=keras.__version__, tensorflow=tf.__version__, names=len(lines), rows=len(rows))]
    text += ["| gradient of | at | what comes out | true, by closed form or SciPy |", "|---|---|---|---|"]
    for name in sorted(faults):
        row = faults[name][0]
        truth = confirmed.get(name, "")
        text.append(f"| `{name}` | {row['point']} | {row['verdict']}: {row['words']} | {truth} |")
    text += ["", "## All verdicts", "", ", ".join(f"{n} {v}" for v, n in total.most_common()) + ".", ""]
    text += ["## Left out, and why", "", "| name | reason |", "|---|---|"]
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, row in rows:
        if row["verdict"] in ("left out", "error"):
            reasons[row["words"]].append(name)
    text += [
        f"| {', '.join(f'`{n}`' for n in dict.fromkeys(names))} | {why} |" for why, names in sorted(reasons.items())
    ]
    (ROOT / "docs" / "library-gradients.md").write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    action, target = sys.argv[1], Path(sys.argv[2])
    if action == "run":
        run(target, sys.argv[3] if len(sys.argv) > 3 else "")
    else:
        page(target)
