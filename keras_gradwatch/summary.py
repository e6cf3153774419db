"""What people read in a terminal: the verdict first, then the culprit, why, what to try, and how sure we are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from keras_gradwatch.records import FINDINGS, VERDICTS, CheckResult, Evidence, Finding, TensorCheck, TensorInfo
from keras_gradwatch.signals import layers_of
from keras_gradwatch.words import WIDTH, counted, culprit_words, factor_words, folded, number, plain, short, wrapped

__all__ = [
    "certified",
    "check_facts",
    "check_mark",
    "check_word",
    "cost_words",
    "culprit_words",
    "evidence_lines",
    "factor_words",
    "render_check",
    "rounding_of",
    "summarize",
    "why",
]

_MOST_OF_A_KIND = 3  # findings told in full, before the rest of that kind share a line
#: Tensors up to which a check is printed as a table.
MOST_ROWS = 40
_SPAN_COLUMN = 72

_SEVERITY_MARKS = {"error": "✗", "warning": "!", "info": "·"}
VERDICT_MARKS = dict.fromkeys(VERDICTS, "✗") | {
    "inconclusive": "?",
    "declared": "·",
    "zero": "·",
    "kink": "·",
    "ok": "✓",
}
#: Findings whose layer is the cause, while their tensors are what it spoils.
_LAYER_IS_CAUSE = ("mismatch", "nonfinite", "disconnected")
ASLEEP = "the check's own control failed: it would have missed a planted error of 1 %"

#: What a verdict other than ok says about some tensors, when there is no finding that says more.
_MEANINGS = {
    "mismatch": "wrong: the gradient is not the slope of the loss",
    "nonfinite": "NaN or Inf in the gradient",
    "imprecise": "lost in the training dtype, though the formula is right",
    "inconclusive": "not certified",
    "disconnected": "not reached by the loss: the gradient is None",
    "declared": "different on purpose",
    "zero": "zero gradient, and the numeric slope agrees",
    "kink": "at a kink, between the left and the right slope: no fault",
}


def summarize(
    steps: int,
    tensors: Sequence[TensorInfo],
    *,
    findings: Sequence[Finding] = (),
    checks: Sequence[CheckResult] = (),
    num_checks: int | None = None,
    cost_share: float = math.nan,
    cost_seconds: float = math.nan,
    notes: Sequence[str] = (),
) -> str:
    """One training run in words, for a terminal.

    Args:
        steps: optimizer steps done.
        tensors: weights and inputs watched, in network order.
        findings: what the rules found; more than three of a kind are folded.
        checks: the gradient checks made, oldest first. A tensor counts as wrong if any check found it wrong; otherwise
            the latest check that came to a conclusion counts.
        num_checks: number of checks made when ``checks`` holds only some of them.
        cost_share: time spent watching, as a share of the training time; NaN when unknown.
        cost_seconds: the same in seconds; NaN when unknown.
        notes: remarks, each told on its own line after those of the checks.

    Returns:
        Plain text of lines up to 100 columns, no newline at the end.

    Example:
        >>> kernel = TensorInfo(layer="dense", tensor="dense/kernel", role="weight", depth=0, shape=(2, 2))
        >>> right = TensorCheck(tensor="dense/kernel", verdict="ok", error=4e-9, bar=2e-8, rounding_error=3e-7)
        >>> print(summarize(600, [kernel], checks=[CheckResult(tensors=(kernel,), checks=(right,))], cost_share=0.013))
        GradWatch   600 steps · 1 weight · checked once · cost 1.3 % of training time
        ✓ no findings
        ✓ the weight is right: worst error 4e-09 (bar 2e-08), rounding at most 3e-07
    """
    certainty = _certainty_lines(tensors, checks, {finding.finding for finding in findings})
    lines = [_headline(steps, tensors, num_checks or len(checks), cost_words(cost_share, cost_seconds))]
    lines += _finding_lines(findings, tensors, checks, steps)
    if not steps and not checks:
        lines.append("? nothing was tracked: no training step was seen")
    elif not findings and not any(line.startswith("✗") for line in certainty):
        lines.append("✓ no findings")
    lines += certainty
    remarks = dict.fromkeys((*(note for result in checks for note in result.notes), *notes))
    lines += [line for remark in remarks for line in wrapped(remark, first="note: ", rest="      ")]
    return "\n".join(lines)


def render_check(result: CheckResult, *, table: bool = True) -> str:
    """One gradient check in words, for ``print``.

    Args:
        result: the check.
        table: end with a table of the tensors.

    Returns:
        The verdict; the culprits; a line for each tensor that is not plainly right, with the reason; a table of all, up
        to 40 tensors; single slopes of wrong tensors, where there are any. Plain text of lines up to 100 columns (but
        for that last table), no newline at the end.
    """
    lines = wrapped(" · ".join(check_facts(result)), first=f"{check_mark(result)} {check_word(result)}   ", rest="    ")
    lines += [] if result.awake else wrapped(ASLEEP, first="  ? ", rest="    ")
    for culprit in result.culprits:
        lines += wrapped(culprit_words(culprit), first="  ✗ " if culprit.kind != "cut" else "  · ", rest="    ")
    lines += _reason_lines(result.checks)
    if table and len(result.checks) <= MOST_ROWS:
        lines += _table(result.checks)
    lines += evidence_lines(result.evidence)
    return "\n".join(lines + [line for note in result.notes for line in wrapped(note, first="note: ", rest="      ")])


def cost_words(share: float, seconds: float = math.nan) -> str:
    """What watching cost, in words; empty when unknown.

    Example:
        >>> cost_words(0.013), cost_words(0.6, 1.94)
        ('1.3 % of training time', '1.9 s, 60.0 % of training time')
    """
    if math.isnan(share):
        return ""
    # A short run is watched for longer than it trains, since the first check traces: seconds tell that it is no matter.
    return ("" if math.isnan(seconds) else f"{seconds:.1f} s, ") + f"{100 * share:.1f} % of training time"


def check_mark(result: CheckResult) -> str:
    """The sign of a check's verdict: ``"✓"``, ``"?"`` or ``"✗"``."""
    mark = VERDICT_MARKS[result.verdict]
    return "✓" if mark == "·" else mark


def check_word(result: CheckResult) -> str:
    """The verdict, and that it is no fault where the word alone, such as ``"zero"``, could be taken for one."""
    return f"{result.verdict}: no fault" if check_mark(result) == "✓" and result.verdict != "ok" else result.verdict


def rounding_of(check: TensorCheck) -> float:
    """The rounding error; NaN for a gradient that is zero, to which nothing can be compared."""
    return math.nan if check.verdict == "zero" else check.rounding_error


def check_facts(result: CheckResult) -> list[str]:
    """What was checked, and how many tensors got which verdict."""
    counts = Counter(check.verdict for check in result.checks)
    parts = [f"{counted(result.tensors) or 'nothing'} checked"]
    parts += [", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])] if counts else []
    parts += [] if math.isnan(result.loss) else [f"loss {result.loss:.6g}"]
    return [*parts, f"{result.evaluations} loss evaluations"] if result.evaluations else parts


def certified(result: CheckResult) -> str:
    """Which tensors a check found right, and how sure that is; empty when there are none."""
    return " ".join(line.strip("✓ ") for line in _right_lines(result.tensors, _standing([result])))


def why(check: TensorCheck) -> str:
    """Why a tensor is not plainly right."""
    factor = [factor_words(check.factor)] if check.verdict == "mismatch" and not math.isnan(check.factor) else []
    return "; ".join([*factor, *([check.reason] if check.reason else [])]) or _MEANINGS[check.verdict]


def evidence_lines(evidence: Sequence[Evidence]) -> list[str]:
    """Single slopes, analytic beside numeric, as an aligned table; no lines when there are none.

    Args:
        evidence: the slopes.

    Returns:
        A line of headings and one per slope: tensor, entry or direction, analytic, numeric, error, bar, delta, dtype.
    """
    if not evidence:
        return []
    headings = ("tensor", "along", "analytic", "numeric", "error", "bar", "delta", "dtype")
    rows = [
        (short(e.tensor, 24), e.along, f"{e.analytic:.4e}", f"{e.numeric:.4e}", f"{e.error:.1e}", f"{e.bar:.0e}",
         f"{e.delta:.0e}", e.dtype)
        for e in evidence
    ]  # fmt: skip
    widths = [max(len(row[k]) for row in (headings, *rows)) for k in range(len(headings))]
    left = (0, 1, 7)
    return [
        "  " + "  ".join(f"{cell:{'<' if k in left else '>'}{widths[k]}}" for k, cell in enumerate(row)).rstrip()
        for row in (headings, *rows)
    ]


def _headline(steps: int, tensors: Sequence[TensorInfo], num_checks: int, cost: str) -> str:
    times = {0: "not checked", 1: "checked once"}.get(num_checks, f"checked {num_checks:,} times")
    parts = [number(steps, "step"), counted(tensors) or "no tensors", times]
    parts += [f"cost {cost}"] if cost else []
    return f"GradWatch   {' · '.join(parts)}"


def _finding_lines(
    findings: Sequence[Finding], tensors: Sequence[TensorInfo], checks: Sequence[CheckResult], steps: int
) -> list[str]:
    """Each finding, the first ones of a kind in full."""
    lines: list[str] = []
    names = dict.fromkeys(finding.finding for finding in findings)
    for name in sorted(names, key=lambda name: FINDINGS.index(name) if name in FINDINGS else len(FINDINGS)):
        alike = [finding for finding in findings if finding.finding == name]
        # A single one left would take as much room to fold as to tell.
        told = alike if len(alike) == _MOST_OF_A_KIND + 1 else alike[:_MOST_OF_A_KIND]
        for finding in told:
            lines.append(_title(finding, tensors, _span(finding, checks, steps)))
            lines += wrapped(finding.message, first="    ", rest="    ")
            lines += wrapped(finding.advice, first="    try: ", rest="         ") if finding.advice else []
        rest = alike[len(told) :]
        if rest:
            layers = tuple(dict.fromkeys(finding.layer for finding in rest))
            text = f"and {len(rest)} more {name}: {folded(layers, layers_of(tuple(tensors)))}"
            lines += wrapped(text, first="  … ", rest="    ")
    return lines


def _title(finding: Finding, tensors: Sequence[TensorInfo], span: str) -> str:
    left = plain(f"{_SEVERITY_MARKS[finding.severity]} {finding.finding:<11} {_place(finding, tensors)}")
    room = WIDTH - len(span) - 2
    return f"{short(left, room):<{min(room, _SPAN_COLUMN)}}  {span}"


def _place(finding: Finding, tensors: Sequence[TensorInfo]) -> str:
    """The layer, with its class, or the layers if the finding is about several."""
    marked = layers_of(tuple(tensor for tensor in tensors if tensor.tensor in finding.tensors))
    if len(marked) > 1 and finding.finding not in _LAYER_IS_CAUSE:
        return folded(marked, layers_of(tuple(tensor for tensor in tensors if tensor.role == "weight")))
    classes = {tensor.layer: tensor.layer_class for tensor in tensors}
    name = short(finding.layer)
    if finding.layer not in classes:
        return name  # the loss, the data, or a layer without weights
    return f"layer {name} ({classes[finding.layer]})" if classes[finding.layer] else f"layer {name}"


def _span(finding: Finding, checks: Sequence[CheckResult], steps: int) -> str:
    """When it was seen; findings of the last check or of the last step are not over."""
    verdicts = {check.tensor: check.verdict for check in checks[-1].checks} if checks else {}
    last_check_agrees = any(verdicts.get(tensor) == finding.finding for tensor in finding.tensors)
    if last_check_agrees or finding.last_step >= steps:
        return f"since step {finding.first_step:,}"
    if finding.first_step == finding.last_step:
        return f"step {finding.first_step:,}"
    return f"steps {finding.first_step:,}–{finding.last_step:,}"


def _certainty_lines(tensors: Sequence[TensorInfo], checks: Sequence[CheckResult], told: set[str]) -> list[str]:
    """How sure we are: what was certified and how well, and a line for each other verdict without a finding."""
    if not checks:
        return ["? no gradient check was made: nothing here says whether the gradients are right"]
    standing = _standing(checks)
    lines = _right_lines(tensors, standing)
    for verdict, meaning in _MEANINGS.items():
        alike = [tensor for tensor in tensors if verdict == _verdict(standing, tensor)]
        if alike and verdict not in told:
            reason = next((reason for tensor in alike if (reason := standing[_identity(tensor)].reason)), "")
            names = folded([tensor.tensor for tensor in alike], [tensor.tensor for tensor in tensors])
            text = f"{counted(alike)} {meaning}{f' ({reason})' if reason else ''}: {names}"
            lines += wrapped(text, first=f"{VERDICT_MARKS[verdict]} ", rest="    ")
    unchecked = [tensor for tensor in tensors if not _verdict(standing, tensor)]
    if unchecked:
        names = folded([tensor.tensor for tensor in unchecked], [tensor.tensor for tensor in tensors])
        lines += wrapped(f"{counted(unchecked)} never checked: {names}", first="? ", rest="    ")
    return lines


def _right_lines(tensors: Sequence[TensorInfo], standing: dict[tuple[str, str], TensorCheck]) -> list[str]:
    right = [tensor for tensor in tensors if _verdict(standing, tensor) == "ok"]
    if not right:
        return []
    numbers = [standing[_identity(tensor)] for tensor in right]
    shares = [_share(right, tensors, role) for role in ("weight", "input")]
    text = f"{' and '.join(share for share in shares if share)} {'is' if len(right) == 1 else 'are'} right"
    error, bar = _largest(check.error for check in numbers), _largest(check.bar for check in numbers)
    rounding = _largest(check.rounding_error for check in numbers)
    quality = [] if math.isnan(error) else [f"worst error {error:.0e} (bar {bar:.0e})"]
    quality += [] if math.isnan(rounding) else [f"rounding at most {rounding:.0e}"]
    return wrapped(f"{text}{': ' if quality else ''}{', '.join(quality)}", first="✓ ", rest="    ")


def _share(right: Sequence[TensorInfo], tensors: Sequence[TensorInfo], role: str) -> str:
    """``"16 of 18 weights"``, ``"all 18 weights"``, ``"the input"`` or nothing."""
    some = sum(tensor.role == role for tensor in right)
    total = sum(tensor.role == role for tensor in tensors)
    if not some:
        return ""
    if some < total:
        return f"{some:,} of {number(total, role)}"
    return f"the {role}" if total == 1 else f"all {number(total, role)}"


def _standing(checks: Sequence[CheckResult]) -> dict[tuple[str, str], TensorCheck]:
    """What all checks together say of each tensor, under its role and name."""
    rows: dict[tuple[str, str], list[TensorCheck]] = {}
    for result in checks:
        for tensor, check in zip(result.tensors, result.checks, strict=True):
            if not result.awake and check.verdict in ("ok", "zero", "kink"):
                check = replace(check, verdict="inconclusive", reason=ASLEEP)
            rows.setdefault(_identity(tensor), []).append(check)
    return {identity: _together(row) for identity, row in rows.items()}


def _together(row: Sequence[TensorCheck]) -> TensorCheck:
    wrong = [check for check in row if check.verdict == "mismatch"]
    conclusive = [check for check in row if check.verdict != "inconclusive"]
    chosen = (wrong or conclusive or row)[-1]
    alike = [check for check in row if check.verdict == chosen.verdict]
    return replace(
        chosen,
        error=_largest(check.error for check in alike),
        bar=_largest(check.bar for check in alike),
        rounding_error=_largest(check.rounding_error for check in alike),
    )


def _identity(tensor: TensorInfo) -> tuple[str, str]:
    return tensor.role, tensor.tensor


def _verdict(standing: dict[tuple[str, str], TensorCheck], tensor: TensorInfo) -> str:
    check = standing.get(_identity(tensor))
    return check.verdict if check else ""


def _reason_lines(checks: Sequence[TensorCheck]) -> list[str]:
    """Tensors that are not plainly right, most alarming first, and why."""
    alarming = sorted(
        (check for check in checks if check.verdict != "ok"), key=lambda check: VERDICTS.index(check.verdict)
    )
    shown = alarming[:MOST_ROWS]
    width = max((len(short(check.tensor)) for check in shown), default=0)
    lines: list[str] = []
    for check in shown:
        first = f"  {VERDICT_MARKS[check.verdict]} {short(check.tensor):<{width}}  {check.verdict:<12}  "
        lines += wrapped(why(check), first=first, rest=" " * len(first))
    return lines + ([f"  … and {len(alarming) - len(shown)} more"] if len(alarming) > len(shown) else [])


def _table(checks: Sequence[TensorCheck]) -> list[str]:
    """All tensors, aligned."""
    if not checks:
        return []
    width = max(len("tensor"), *(len(short(check.tensor)) for check in checks))
    lines = [f"  {'':1} {'tensor':<{width}}  {'verdict':<12}  {'error':>7}  {'bar':>7}  rounding"]
    for check in checks:
        numbers = f"{check.error:>7.1e}  {check.bar:>7.1e}  {rounding_of(check):>8.1e}"
        mark, name = VERDICT_MARKS[check.verdict], short(check.tensor)
        lines.append(f"  {mark} {name:<{width}}  {check.verdict:<12}  {numbers.replace('nan', '  –')}")
    return lines


def _largest(values: Iterable[float]) -> float:
    """The largest number that is not NaN; NaN if there is none."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)
