"""What notebooks show: the verdict first, then the culprits and what to try, then every tensor. It escapes everything.

The page is not ours, so ink and paper are those of the notebook, light or dark, and colours are readable on both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

from keras_gradwatch.account import Account
from keras_gradwatch.records import VERDICTS, CheckResult, Finding, TensorCheck, TensorInfo
from keras_gradwatch.summary import (
    ASLEEP,
    VERDICT_MARKS,
    certified,
    check_facts,
    check_mark,
    check_word,
    culprit_words,
    rounding_of,
    why,
)
from keras_gradwatch.words import MARKS, MEANINGS, plain, short

_MOST_FINDINGS = 12
_MOST_ROWS = 200
#: Rows up to which a table stands open.
_FEW_ROWS = 15

#: Contrast of at least 4 : 1 against white and against #1e1e1e (our measurement).
_COLOURS = {"error": "#d3521d", "warning": "#a3760a", "good": "#0f8a63", "info": "#7a8290"}
_STATES = {"✗": "error", "!": "warning", "✓": "good", "?": "warning", "·": "info"}

_BOX = "border-left: 6px solid {0}; background: {0}1c; border-radius: 5px; padding: 0.45em 0.9em; margin: 0.35em 0;"
_CELL = "padding: 0.15em 0.8em 0.15em 0; border: 0; vertical-align: top; white-space: nowrap; background: none;"


def check_html(result: CheckResult) -> str:
    """A gradient check as a piece of HTML.

    Args:
        result: the check.

    Returns:
        A banner with the verdict, a box per culprit, and a table of the tensors, those that are not right on top; of
        more than 200 tensors those that are right are left out first.
    """
    culprits = [culprit for culprit in result.culprits if culprit.kind != "cut"]
    mark, state = check_mark(result), _STATES[check_mark(result)]
    title, answer = check_word(result), certified(result)
    if culprits:
        first = culprits[0]
        title += f": {plain(first.layer)}" + (f" ({plain(first.layer_class)})" if first.layer_class else "")
    elif mark == "✓":
        title += f"{',' if ':' in title else ':'} the gradients are the slopes of the loss"
    parts = [_banner(state, mark, title, answer, " · ".join(check_facts(result)))]
    parts += [] if result.awake else [_box("warning", escape(ASLEEP))]
    parts += [_box("info" if c.kind == "cut" else "error", escape(plain(culprit_words(c)))) for c in result.culprits]
    parts += [_small(f"note: {plain(note)}") for note in result.notes]
    return _page([*parts, _check_table(result)])


def run_html(account: Account) -> str:
    """A training run as a piece of HTML.

    Args:
        account: what its history tells.

    Returns:
        A banner with the verdict, a box per finding with what to try, up to 12, and how sure that is.
    """
    if not account.steps and not account.checks:
        return _page(
            [_banner("info", "?", "Nothing was watched yet", "Call model.fit(x, y, callbacks=[watch]).", "GradWatch")]
        )
    banner = account.banner()
    parts = [_banner(banner.state, banner.mark, banner.title, banner.answer, f"GradWatch · {banner.facts}")]
    parts += [_finding(account, finding, told=banner.answer) for finding in account.findings[:_MOST_FINDINGS]]
    left_out = len(account.findings) - _MOST_FINDINGS
    parts += [f"<div>… and {left_out:,} more</div>"] if left_out > 0 else []
    parts += [_line(line) for line in account.certainty()]
    parts.append(
        _small("watch.plot() draws it · watch.report('run.html') writes all of it · watch.history is the data")
    )
    return _page(parts)


def _finding(account: Account, finding: Finding, *, told: str) -> str:
    colour = _COLOURS[finding.severity]
    name = f'<b style="color: {colour}">{MARKS[finding.severity]} {escape(plain(finding.finding))}</b>'
    head = f"{name} &nbsp;<b>{escape(account.place(finding))}</b> &nbsp;{_small(account.span(finding), tag='span')}"
    meaning = MEANINGS.get(finding.finding, "")
    lines = [head, "" if meaning in told else escape(meaning), f"<b>Why:</b> {escape(short(finding.message, 1_000))}"]
    lines += [f"<b>Try:</b> {escape(short(finding.advice, 1_000))}"] if finding.advice else []
    return _box(finding.severity, "<br>".join(line for line in lines if line))


def _check_table(result: CheckResult) -> str:
    checks = result.checks
    if not checks:
        return ""
    rows = sorted(zip(result.tensors, checks, strict=True), key=lambda row: VERDICTS.index(row[1].verdict))[:_MOST_ROWS]
    body = "".join(_row(info, check) for info, check in rows)
    left_out = f" ({len(checks) - len(rows):,} that are right are left out)" if len(rows) < len(checks) else ""
    names = ("", "tensor", "layer", "verdict", "error", "error bar", "rounding", "why")
    head = "".join(
        f'<th style="{_CELL} text-align: {"right" if 4 <= k <= 6 else "left"}">{n}</th>' for k, n in enumerate(names)
    )
    opened = " open" if len(rows) <= _FEW_ROWS or result.verdict != "ok" else ""
    title = f'<summary style="cursor: pointer">{len(checks):,} tensors{left_out}</summary>'
    table = (
        f'<table style="border-collapse: collapse; margin: 0.3em 0; font-size: 0.92em"><thead><tr>{head}</tr></thead>'
    )
    scroll = f'<div style="overflow-x: auto">{table}<tbody>{body}</tbody></table></div>'
    return f'<details{opened} style="margin-top: 0.5em">{title}{scroll}</details>'


def _row(info: TensorInfo, check: TensorCheck) -> str:
    mark = VERDICT_MARKS[check.verdict]
    strong = f"color: {_COLOURS[_STATES[mark]]}; font-weight: 600;"
    cells = [
        (mark, strong), (short(check.tensor, 60), ""),
        (f"{short(info.layer)} ({info.layer_class})" if info.layer_class else short(info.layer), ""),
        (check.verdict, strong),
    ]  # fmt: skip
    cells += [(_number(value), "text-align: right;") for value in (check.error, check.bar, rounding_of(check))]
    reason = "" if check.verdict == "ok" else plain(why(check))[:300]
    cells.append((reason, "white-space: normal; min-width: 14em;" if reason else ""))
    inner = "".join(f'<td style="{_CELL} text-align: left; {style}">{escape(text)}</td>' for text, style in cells)
    return f'<tr style="background: none">{inner}</tr>'


def _banner(state: str, mark: str, title: str, answer: str, facts: str) -> str:
    sign = f'<span style="color: {_COLOURS[state]}">{mark}</span>'
    head = f'<span style="font-size: 1.25em; font-weight: 700">{sign} {escape(title)}</span>'
    return _box(state, "<br>".join([head, *([escape(answer)] if answer else []), _small(facts, tag="span")]))


def _box(state: str, inner: str) -> str:
    return f'<div style="{_BOX.format(_COLOURS[state])}">{inner}</div>'


def _line(line: str) -> str:
    mark, text = line[:1], line[1:]
    colour = _COLOURS[_STATES.get(mark, "info")]
    return f'<div><b style="color: {colour}">{escape(mark)}</b>{escape(text)}</div>'


def _small(text: str, *, tag: str = "div") -> str:
    return f'<{tag} style="opacity: 0.75; font-size: 0.88em">{escape(text)}</{tag}>'


def _page(parts: Iterable[str]) -> str:
    style = "max-width: 62em; line-height: 1.45; font-variant-numeric: tabular-nums; overflow-wrap: anywhere"
    return f'<div style="{style}">{"".join(parts)}</div>'


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1e}"
