"""The report: one page of HTML that anybody can open, the verdict first. It loads nothing and escapes everything."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from keras_gradwatch import __version__
from keras_gradwatch._optional import require
from keras_gradwatch.drawings import drawings
from keras_gradwatch.pictures import View, view_of
from keras_gradwatch.records import Finding
from keras_gradwatch.report_tables import COLUMNS, check_rows, event_tables, tensor_rows
from keras_gradwatch.words import MARKS, MEANINGS, plain, short

_MOST_FINDINGS = 40
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
        **asdict(view.account.banner()), script_hash=_script_hash(template),
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


def _finding(view: View, finding: Finding) -> dict[str, str]:
    return {
        "state": finding.severity,
        "mark": MARKS[finding.severity],
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
