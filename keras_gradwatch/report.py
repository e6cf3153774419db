"""The report: one page of HTML that anybody can open, the verdict first. It loads nothing and escapes everything."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from keras_gradwatch import __version__
from keras_gradwatch._optional import require
from keras_gradwatch.drawings import drawings
from keras_gradwatch.pictures import View, view_of
from keras_gradwatch.records import Finding
from keras_gradwatch.report_tables import COLUMNS, check_rows, event_tables, tensor_rows
from keras_gradwatch.words import number, plain, short

#: What a finding means, for readers who meet the word for the first time.
MEANINGS = {
    "mismatch": "The backward pass gives another gradient than the slope of the loss: a formula is wrong.",
    "nonfinite": "The loss or a gradient became NaN or infinite.",
    "disconnected": "The loss does not reach this weight: it has no gradient and never learns.",
    "imprecise": "The formula is right, but the training dtype loses it: overflow, underflow or cancellation.",
    "zero_gradient": "The gradient is exactly zero, though the weight is connected.",
    "exploding": "Gradients, updates or the loss run away.",
    "vanishing": "Gradients fade on their way from the loss to the first layers, until those no longer learn.",
    "dead_units": "Units of this layer no longer get any gradient.",
    "saturated": "The activations of this layer sit at their limits, where the gradient is almost zero.",
    "oscillating": "Loss and gradients swing instead of settling.",
    "stalled": "The weights hardly move, for their size.",
}

_MOST_FINDINGS = 40
_MARKS = {"error": "✗", "warning": "!", "info": "·"}
_VERSIONS = ("keras_gradwatch", "keras", "backend", "schema_version")


def write_report(history: pd.DataFrame | View, path: str | os.PathLike[str]) -> Path:
    """Writes the report of a run as one HTML file.

    Args:
        history: a history frame, such as ``watch.history`` or what ``read_history`` returns.
        path: of the file; one that is there is replaced.

    Returns:
        The path.

    Raises:
        ModuleNotFoundError: jinja2 or matplotlib is not installed.
        OSError: the file cannot be written.
        ValueError: ``history`` is not a history frame.
    """
    target = Path(path)
    target.write_text(render_report(history), encoding="utf-8")
    return target


def render_report(history: pd.DataFrame | View) -> str:
    """The report of a run as one page of HTML.

    Args:
        history: a history frame.

    Returns:
        The page: verdict, findings, pictures, tables, settings. Nothing outside of it is loaded, and whatever comes
        from the history is escaped; a policy in its head allows no script but its own.

    Raises:
        ModuleNotFoundError: jinja2 or matplotlib is not installed.
        ValueError: ``history`` is not a history frame.
    """
    view = view_of(history)
    template = importlib.resources.files("keras_gradwatch").joinpath("report.html").read_text(encoding="utf-8")
    jinja2 = require("jinja2", "report")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    rows, left_out = tensor_rows(view)
    caption = "Check, error and bar are those of the worst check, gradient and update ratio are medians over the run. "
    caption += f"{left_out:,} unremarkable tensors are left out." if left_out else "Click a heading to sort."
    findings = [_finding(view, finding) for finding in view.account.findings]
    page: str = environment.from_string(template).render(
        **_verdict(view), script_hash=_script_hash(template), facts=_facts(view),
        findings=findings[:_MOST_FINDINGS], findings_left_out=max(0, len(findings) - _MOST_FINDINGS),
        certainty=view.account.certainty(), pictures=drawings(view), events=event_tables(view), **check_rows(view),
        columns=COLUMNS, rows=rows, table_caption=caption, groups=_groups(view), version=__version__,
    )  # fmt: skip
    return page


def _script_hash(template: str) -> str:
    """What the page's policy allows to run: the script of the template, as it stands there."""
    scripts = re.findall(r"<script>(.*?)</script>", template, re.DOTALL)
    digest = hashlib.sha256(scripts[0].encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _verdict(view: View) -> dict[str, str]:
    """Mark, title and answer of the banner, and what colour it has."""
    account = view.account
    counts = {severity: sum(f.severity == severity for f in account.findings) for severity in ("error", "warning")}
    state = next((severity for severity, count in counts.items() if count), "good")
    first = next((f for f in account.findings if f.severity == state), None)
    if first is not None:
        others = len(account.findings) - 1
        title = f"{plain(first.finding)}: {account.place(first)}, {account.span(first)}"
        answer = f"and {number(others, 'more finding')}, below" if others else ""
        return {"state": state, "mark": _MARKS[first.severity], "title": title, "answer": answer}
    if account.fails("error"):
        return {"state": "error", "mark": "✗", "title": "The gradient check found wrong gradients", "answer": ""}
    if not account.checks:
        answer = "No gradient check was made, so nothing here says whether the gradients are right."
        return {"state": "info", "mark": "?", "title": "No findings, but nothing was checked", "answer": answer}
    return {"state": "good", "mark": "✓", "title": "No findings", "answer": account.certainty()[0].lstrip("✓ ")}


def _facts(view: View) -> str:
    account = view.account
    weights = sum(tensor.role == "weight" for tensor in account.tensors)
    facts = [plain(str(account.attributes.get("model", "run"))), number(account.steps, "step")]
    facts += [number(weights, "weight"), number(len(account.checks), "gradient check")]
    share = account.cost.get("share", math.nan)
    facts += [] if math.isnan(share) else [f"watching cost {100 * share:.1f} % of the training time"]
    return " · ".join(facts)


def _finding(view: View, finding: Finding) -> dict[str, str]:
    return {
        "state": finding.severity,
        "mark": _MARKS[finding.severity],
        "name": plain(finding.finding),
        "place": view.account.place(finding),
        "when": view.account.span(finding),
        "meaning": MEANINGS.get(finding.finding, ""),
        "message": short(finding.message, 2_000),
        "advice": short(finding.advice, 2_000),
    }


def _groups(view: View) -> list[dict[str, Any]]:
    """Settings, cost and versions, as far as they are known."""
    account = view.account
    groups: dict[str, Mapping[str, object]] = {
        "Settings": {name: value for name, value in account.attributes.items() if name not in (*_VERSIONS, "notes")},
        "Time": _times(account.cost),
        "Versions": {name: account.attributes[name] for name in _VERSIONS if name in account.attributes},
        "Notes": {str(place): note for place, note in enumerate(account.notes(), 1)},
    }
    return [
        {"title": title, "entries": [(plain(name), _value(value)) for name, value in entries.items()]}
        for title, entries in groups.items()
        if entries
    ]


def _times(cost: Mapping[str, float]) -> dict[str, str]:
    times = dict[str, str]()
    for name, seconds in cost.items():
        part, _, unit = name.rpartition("_")
        if unit == "seconds":
            share = cost.get(f"{part}_share", math.nan)
            times[part] = f"{seconds:.2f} s" + ("" if math.isnan(share) else f" ({100 * share:.1f} % of training)")
    return times


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(plain(str(entry)) for entry in value) or "none"
    return plain(str(value))[:500]
