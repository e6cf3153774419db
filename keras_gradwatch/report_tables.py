"""The tables of a report: tensors, checks, and the steps before something broke."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_gradwatch.account import verdict_counts, worst_checks
from keras_gradwatch.pictures import View
from keras_gradwatch.records import CheckResult, Finding, TensorCheck, TensorInfo
from keras_gradwatch.samples import medians
from keras_gradwatch.words import plain, short

_MOST_ROWS = 3_000
_MOST_CHECKS = 60
_MOST_EVENTS = 4
_STEPS_BEFORE, _STEPS_AFTER = 8, 2
#: Steps over which a median in the table is taken at most, evenly spaced: of more, the third digit would be the same.
_MEDIAN_STEPS = 1_000

_CLASSES = dict.fromkeys(("mismatch", "nonfinite"), "alarm") | dict.fromkeys(("imprecise", "disconnected"), "caution")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of the table of tensors: its key in links, its heading, what it means, and whether it holds text."""

    key: str
    name: str
    meaning: str
    text: bool = False


COLUMNS = (
    Column(key="order", name="#", meaning="place in network order, 1 is nearest the input"),
    Column(key="layer", name="layer", meaning="layer path", text=True),
    Column(key="tensor", name="tensor", meaning="weight of that layer, or name of the input", text=True),
    Column(key="size", name="size", meaning="number of elements"),
    Column(key="findings", name="findings", meaning="findings that mark this tensor", text=True),
    Column(key="check", name="check", meaning="most alarming verdict of any gradient check", text=True),
    Column(key="error", name="error", meaning="|analytic − numeric| relative to the gradient, in float64"),
    Column(key="bar", name="bar", meaning="the smallest error that check could have seen"),
    Column(key="rounding", name="rounding", meaning="what the training dtype loses, relative to the gradient"),
    Column(key="rms", name="gradient rms", meaning="root mean square of the gradient, median over the run"),
    Column(key="last", name="at the end", meaning="root mean square of the gradient at the last step"),
    Column(key="zeros", name="zeros", meaning="share of exact zeros in the gradient, median over the run"),
    Column(key="update", name="update ratio", meaning="‖update‖ / ‖weight‖ per step, median over the run"),
)


def tensor_rows(view: View) -> tuple[list[dict[str, Any]], int]:
    """The table of tensors.

    Args:
        view: the run.

    Returns:
        Rows in network order, and how many unremarkable tensors were left out to keep the page small.
    """
    statistics = _statistics(view)
    checks = {_identity(info): check for info, check in worst_checks(view.account)}
    marked = _marks(view.account.findings)
    rows = [
        _tensor_row(
            place, info, checks.get(_identity(info), TensorCheck(tensor=info.tensor, verdict="")),
            marked.get(info.tensor, ""), statistics.get((info.layer, info.tensor), (math.nan,) * 4),
        )
        for place, info in enumerate(view.account.tensors, 1)
    ]  # fmt: skip
    keep = rows if len(rows) <= _MOST_ROWS else sorted(rows, key=lambda row: not row["notable"])[:_MOST_ROWS]
    return keep, len(rows) - len(keep)


def _tensor_row(
    place: int, info: TensorInfo, check: TensorCheck, names: str, numbers: tuple[float, ...]
) -> dict[str, Any]:
    rms, last, zeros, update = numbers
    own = info.tensor.rpartition(f"{info.layer}/")[2] or info.tensor
    cells = [
        _count(place), _text(short(info.layer, 100), title=short(info.layer_class, 100)),
        _text(short(own, 100), title=short(info.tensor, 300)), _count(info.size),
        _text(names, "alarm" if names else ""), _text(check.verdict, _CLASSES.get(check.verdict, "")),
        _number(check.error), _number(check.bar), _number(check.rounding_error),
        _number(rms), _number(last), _number(zeros, share=True), _number(update),
    ]  # fmt: skip
    return {"notable": bool(names) or check.verdict not in ("", "ok"), "cells": cells}


def check_rows(view: View) -> dict[str, Any]:
    """``checks``, the latest ones, oldest first, and ``checks_left_out``, how many came before them."""
    pairs = list(zip(view.account.check_steps, view.account.checks, strict=True))
    return {
        "checks": [_check_row(step, result) for step, result in pairs[-_MOST_CHECKS:]],
        "checks_left_out": max(0, len(pairs) - _MOST_CHECKS),
    }


def event_tables(view: View) -> list[dict[str, Any]]:
    """The sampled steps around the begin of what broke during the run, a table for each of the first few findings."""
    steps = view.samples.steps
    sudden = [
        finding
        for finding in view.account.findings
        if steps.size and (finding.finding in ("nonfinite", "exploding") or finding.first_step > steps[0])
    ]
    return [_event_table(view, finding) for finding in sudden if finding.finding != "mismatch"][:_MOST_EVENTS]


def _event_table(view: View, finding: Finding) -> dict[str, Any]:
    samples = view.samples
    rows = view.layers_of(finding)
    layer = (view.culprit_of(finding) or rows.tolist() or [len(samples.layers) - 1])[0]
    event = int(np.searchsorted(samples.steps, finding.first_step))
    shown = range(max(0, event - _STEPS_BEFORE), min(len(samples.steps), event + _STEPS_AFTER + 1))
    near = view.frame.loc[view.frame["step"].between(samples.steps[shown[0]], samples.steps[shown[-1]]).to_numpy()]
    epochs = dict(zip(near["step"].tolist(), near["epoch"].tolist(), strict=True))
    table = list[dict[str, Any]]()
    for place in shown:
        broken = int(samples.nonfinite[place].sum())
        numbers = (samples.losses[place], samples.global_norms[place])
        own = (samples.norms[place, layer], samples.update_ratios[place, layer])
        table.append(
            {
                "is_event": place == event,
                "cells": [
                    f"{samples.steps[place]:,}", f"{epochs[samples.steps[place]]:,}",
                    *("NaN or Inf" if math.isnan(value) and broken else _words(value) for value in numbers),
                    *("NaN or Inf" if samples.nonfinite[place, layer] else _words(value) for value in own),
                    f"{broken} of {len(samples.layers)}",
                ],
            }
        )  # fmt: skip
    title = f"{plain(finding.finding)}: {view.account.place(finding)}, step {finding.first_step:,}"
    return {"title": title, "layer": short(samples.layers[layer]), "rows": table}


def _check_row(step: int, result: CheckResult) -> dict[str, Any]:
    worst = max(result.checks, key=lambda check: -1.0 if math.isnan(check.error) else check.error)
    rounding = [check.rounding_error for check in result.checks if not math.isnan(check.rounding_error)]
    counts = verdict_counts(result)
    return {
        "step": f"{step:,}",
        "verdicts": " · ".join(f"{count} {verdict}" for verdict, count in counts.items()),
        "alarm": bool({"mismatch", "nonfinite"} & set(counts)),
        "error": _words(worst.error),
        "bar": _words(worst.bar),
        "tensor": short(worst.tensor),
        "rounding": _words(max(rounding, default=math.nan)),
    }


def _statistics(view: View) -> dict[tuple[str, str], tuple[float, ...]]:
    """Median and last rms, median zero fraction and update ratio of each weight, under its layer and name."""
    samples, tracked = view.samples, np.flatnonzero(view.samples.tracked)
    if not tracked.size:
        return {}
    chosen = tracked[:: max(1, len(tracked) // _MEDIAN_STEPS)]
    rms, zeros, updates = (samples.table(name) for name in ("grad_rms", "zero_fraction", "update_ratio"))
    columns = (medians(rms[chosen]), rms[tracked[-1]], medians(zeros[chosen]), medians(updates[chosen]))
    names = [(samples.layers[owner], tensor) for owner, tensor in zip(samples.owners, samples.tensors, strict=True)]
    return dict(zip(names, zip(*(column.tolist() for column in columns), strict=True), strict=True))


def _marks(findings: tuple[Finding, ...]) -> dict[str, str]:
    """Names of the findings that mark each tensor."""
    marks: dict[str, dict[str, None]] = {}
    for finding in findings:
        for tensor in finding.tensors:
            marks.setdefault(tensor, {})[plain(finding.finding)] = None
    return {tensor: ", ".join(names) for tensor, names in marks.items()}


def _identity(info: TensorInfo) -> tuple[str, str, str]:
    return info.role, info.layer, info.tensor


def _text(text: str, style: str = "", *, title: str = "") -> dict[str, Any]:
    return {"text": text, "value": None, "class": f"text {style}".strip(), "title": title}


def _count(count: int) -> dict[str, Any]:
    return {"text": f"{count:,}", "value": count, "class": "", "title": ""}


def _number(value: float, *, share: bool = False) -> dict[str, Any]:
    text = f"{100 * value:.0f} %" if share and math.isfinite(value) else _words(value)
    return {"text": text, "value": "nan" if math.isnan(value) else f"{value:.6g}", "class": "", "title": ""}


def _words(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.3g}" if value == 0 or 1e-2 <= abs(value) < 1e4 else f"{value:.1e}"
