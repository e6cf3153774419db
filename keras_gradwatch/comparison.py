"""What differs between two runs, layer by layer."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from keras_gradwatch.account import worst_checks
from keras_gradwatch.pictures import View, view_of
from keras_gradwatch.records import VERDICTS, Finding, Float64Array
from keras_gradwatch.samples import medians
from keras_gradwatch.words import folded, number, plain, short

#: Medians further apart than this factor are told; batches alone rarely make that much (our choice).
FACTOR = 2.0

_MOST_ROWS = 25


def compare(first: pd.DataFrame | View, second: pd.DataFrame | View) -> pd.DataFrame:
    """Two runs side by side, one row per layer that owns weights.

    Args:
        first: a history frame.
        second: another one.

    Returns:
        Index: layers of the first run in network order, then those that only the second has. Columns, each once with
        ``_first`` and once with ``_second`` at its end: ``rms`` and ``update_ratio`` (medians over the run, NaN where
        not measured or the layer is missing), ``check`` (most alarming verdict, empty when not checked), ``findings``
        (comma-joined); and ``in_both``.

    Raises:
        ValueError: one of them is not a history frame.
    """
    sides = {"first": _side(view_of(first)), "second": _side(view_of(second))}
    layers = list(dict.fromkeys([*sides["first"].index, *sides["second"].index]))
    table = pd.DataFrame(index=pd.Index(layers, dtype="str", name="layer"))
    for column in ("rms", "update_ratio", "check", "findings"):
        for name, side in sides.items():
            values = side[column].reindex(layers)
            table[f"{column}_{name}"] = values if column in ("rms", "update_ratio") else values.fillna("")
    table["in_both"] = [layer in sides["first"].index and layer in sides["second"].index for layer in layers]
    return table


def new_findings(first: View, second: View) -> tuple[Finding, ...]:
    """Findings of the second run that the first has not, in the same layer."""
    known = {(finding.finding, finding.layer) for finding in first.account.findings}
    return tuple(finding for finding in second.account.findings if (finding.finding, finding.layer) not in known)


def comparison_words(first: View, second: View, *, names: tuple[str, str]) -> str:
    """What differs between two runs, for a terminal.

    Args:
        first: one run.
        second: the other one.
        names: what to call them.

    Returns:
        Findings that came and went, then the layers whose strength, movement or verdict differs, most different first.
    """
    table = compare(first, second)
    lines = [
        f"{mark}  {plain(name)}   {_facts(view)}" for mark, name, view in zip("AB", names, (first, second), strict=True)
    ]
    for mark, word, findings in (
        ("+", "only in B", new_findings(first, second)),
        ("-", "only in A", new_findings(second, first)),
    ):
        view = second if mark == "+" else first
        lines += [
            f"{mark} {plain(f.finding)} {word}: {short(view.account.place(f), 60)}, {view.account.span(f)}"
            for f in findings
        ]
    for word, column in (("A", "rms_second"), ("B", "rms_first")):
        missing = [layer for layer in table.index[~table["in_both"]] if math.isnan(table.loc[layer, column])]
        if missing:
            lines.append(f"· {number(len(missing), 'layer')} only in {word}: {folded(missing, list(table.index))}")
    return "\n".join([*lines, *_layer_lines(table[table["in_both"]])])


def _layer_lines(table: pd.DataFrame) -> list[str]:
    distance = _distances(table)
    changed = (table["check_first"] != table["check_second"]) | (table["findings_first"] != table["findings_second"])
    differs = np.flatnonzero((distance > math.log(FACTOR)) | changed.to_numpy())
    if not len(table):
        return []
    if not differs.size:
        return [f"✓ the {number(len(table), 'layer')} in both agree: same verdicts, medians within a factor {FACTOR:g}"]
    order = differs[np.argsort(-np.nan_to_num(distance[differs], posinf=1e9), kind="stable")]
    shown = order[:_MOST_ROWS]
    width = max(len(short(str(table.index[row]), 32)) for row in shown)
    lines = [f"  {'layer':<{width}}  {'gradient rms A → B':<26}  {'update ratio A → B':<26}  check A → B"]
    for row in shown:
        values = table.iloc[row]
        name = short(str(table.index[row]), 32)
        rms = _change(float(values["rms_first"]), float(values["rms_second"]))
        update = _change(float(values["update_ratio_first"]), float(values["update_ratio_second"]))
        verdicts = [str(values[f"check_{side}"]) or "–" for side in ("first", "second")]
        verdict = verdicts[0] if verdicts[0] == verdicts[1] else " → ".join(verdicts)
        lines.append(f"  {name:<{width}}  {rms:<26}  {update:<26}  {verdict}")
    same = len(table) - len(order)
    rest = [f"{len(order) - len(shown)} more differ"] if len(order) > len(shown) else []
    rest += [f"{number(same, 'layer')} alike within a factor {FACTOR:g}"] if same else []
    return lines + ([f"  … {', '.join(rest)}"] if rest else [])


def _side(view: View) -> pd.DataFrame:
    samples = view.samples
    chosen = samples.tracked
    checks: dict[str, str] = {}
    for info, check in sorted(worst_checks(view.account), key=lambda pair: VERDICTS.index(pair[1].verdict)):
        checks.setdefault(info.layer, check.verdict)
    findings: dict[str, dict[str, None]] = {}
    for finding in view.account.findings:
        for place in view.layers_of(finding):
            findings.setdefault(samples.layers[place], {})[finding.finding] = None
    return pd.DataFrame(
        {
            "rms": medians(samples.rms[chosen]),
            "update_ratio": medians(samples.update_ratios[chosen]),
            "check": [checks.get(layer, "") for layer in samples.layers],
            "findings": [",".join(findings.get(layer, ())) for layer in samples.layers],
        },
        index=pd.Index(list(samples.layers), dtype="str"),
    )


def _distances(table: pd.DataFrame) -> Float64Array:
    """Largest |log ratio| of the medians of each layer; infinite where one of them is missing or zero."""
    largest = np.zeros(len(table))
    for column in ("rms", "update_ratio"):
        first, second = (table[f"{column}_{side}"].to_numpy(np.float64) for side in ("first", "second"))
        same = (first == second) | (np.isnan(first) & np.isnan(second))
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(same, 0.0, np.abs(np.log(second / first)))
        largest = np.maximum(largest, np.nan_to_num(ratio, nan=np.inf))
    return largest


def _facts(view: View) -> str:
    account = view.account
    losses = view.samples.losses[np.isfinite(view.samples.losses)]
    facts = [number(account.steps, "step"), number(len(account.findings), "finding")]
    facts += [f"loss {losses[0]:.4g} → {losses[-1]:.4g}"] if losses.size else []
    return " · ".join(facts)


def _change(first: float, second: float) -> str:
    words = " → ".join("–" if math.isnan(value) else f"{value:.1e}" for value in (first, second))
    if not (first > 0 and second > 0):
        return words
    factor = second / first
    return f"{words} (×{factor:.2g})" if not 0.5 <= factor <= 2 else words
