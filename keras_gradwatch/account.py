"""The account that a history frame gives of its run: tensors, findings, checks, cost, as records again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from keras_gradwatch.findings import SEVERITIES
from keras_gradwatch.records import (
    ERROR_FINDINGS,
    FINDINGS,
    VERDICTS,
    CheckResult,
    Finding,
    TensorCheck,
    TensorInfo,
)
from keras_gradwatch.samples import codes_of
from keras_gradwatch.summary import cost_words, summarize
from keras_gradwatch.words import MARKS, MEANINGS, folded, number, plain

#: Findings whose layer is the cause, while their tensors are what it spoils.
LAYER_IS_CAUSE = ("mismatch", "nonfinite", "disconnected")

#: Findings about the loss alone, which mark every weight.
ON_THE_LOSS = ("oscillating", "stalled")

_TOLD_WITHOUT = "the file does not hold the finding's message; write it with write_history(watch.history, path)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Banner:
    """The verdict of a run, as it stands on top of a page.

    Attributes:
        state: ``"error"``, ``"warning"``, ``"good"`` or ``"info"``: its colour.
        mark: the sign before the title.
        title: the verdict.
        answer: what else there is to say at once; may be empty.
        facts: what was watched, and what that cost.
    """

    state: str
    mark: str
    title: str
    answer: str
    facts: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One run, as its history frame tells it.

    Attributes:
        steps: number of the last step.
        tensors: inputs and weights, in network order. Their shapes are flat: a frame only knows sizes.
        findings: as the rules told them; without messages when the frame was saved without its ``attrs``.
        check_steps: steps at which a check was made, rising.
        checks: one per such step.
        cost: as ``watch.cost``; empty when unknown.
        attributes: everything else in ``frame.attrs``: settings and versions.
    """

    steps: int
    tensors: tuple[TensorInfo, ...]
    findings: tuple[Finding, ...]
    check_steps: tuple[int, ...]
    checks: tuple[CheckResult, ...]
    cost: Mapping[str, float]
    attributes: Mapping[str, Any]

    @property
    def classes(self) -> dict[str, str]:
        """Class name of each layer, where it is known."""
        return {tensor.layer: tensor.layer_class for tensor in self.tensors if tensor.layer_class}

    def notes(self) -> list[str]:
        """Remarks about the run as a whole."""
        notes = self.attributes.get("notes")
        return [str(note) for note in notes] if isinstance(notes, list) else []

    def summary(self) -> str:
        """The run in words, as ``watch.summary()``."""
        return summarize(
            self.steps, self.tensors, findings=self.findings, checks=self.checks, notes=self.notes(),
            cost_share=self.cost.get("share", math.nan), cost_seconds=self._cost_seconds(),
        )  # fmt: skip

    def certainty(self) -> list[str]:
        """What the checks say of all tensors, findings aside, one sentence each."""
        lines = summarize(self.steps, self.tensors, checks=self.checks).splitlines()[1:]
        sentences = list[str]()
        for line in lines:
            if line.startswith("  ") and sentences:
                sentences[-1] += f" {line.strip()}"
            elif line != "✓ no findings":
                sentences.append(line)
        return sentences

    def banner(self) -> Banner:
        """The verdict, for the top of a page."""
        severities = {finding.severity for finding in self.findings}
        state: str = next((severity for severity in reversed(SEVERITIES) if severity in severities), "good")
        first, others = next((f for f in self.findings if f.severity == state), None), len(self.findings) - 1
        if first is not None:
            mark, title = MARKS[first.severity], f"{plain(first.finding)}: {self.place(first)}, {self.span(first)}"
            more = [f"and {number(others, 'more finding')}, below"] if others else []
            answer = " ".join([*([MEANINGS[first.finding]] if first.finding in MEANINGS else []), *more])
        elif self.fails("error"):
            state, mark, title, answer = "error", "✗", "The gradient check found wrong gradients", ""
        elif not self.checks:
            state, mark, title = "info", "?", "No findings, but nothing was checked"
            answer = "No gradient check was made, so nothing here says whether the gradients are right."
        else:
            mark, title, answer = "✓", "No findings", self.certainty()[0].lstrip("✓ ")
        return Banner(state=state, mark=mark, title=title, answer=answer, facts=self._facts())

    def _facts(self) -> str:
        weights = sum(tensor.role == "weight" for tensor in self.tensors)
        facts = [plain(str(self.attributes.get("model", "run"))), number(self.steps, "step")]
        facts += [number(weights, "weight"), number(len(self.checks), "gradient check")]
        cost = cost_words(self.cost.get("share", math.nan), self._cost_seconds())
        return " · ".join([*facts, *([f"watching cost {cost}"] if cost else [])])

    def _cost_seconds(self) -> float:
        """All that was spent on watching; NaN when unknown."""
        return self.cost.get("share", math.nan) * self.cost.get("training_seconds", math.nan)

    def place(self, finding: Finding) -> str:
        """The layer at fault with its class, or the layers if it is about several."""
        order = list(dict.fromkeys(tensor.layer for tensor in self.tensors if tensor.role == "weight"))
        marked = {tensor.layer for tensor in self.tensors if tensor.tensor in finding.tensors}
        if len(marked) > 1 and finding.finding not in LAYER_IS_CAUSE:
            return folded([layer for layer in order if layer in marked], order)
        kind = self.classes.get(finding.layer, "")
        return f"layer {plain(finding.layer)} ({plain(kind)})" if kind else plain(finding.layer)

    def goes_on(self, finding: Finding) -> bool:
        """True when it was there at the last look: at the last step, or at the last check if that is what shows it."""
        looks = [self.steps, *([self.check_steps[-1]] if self.checks and finding.finding in VERDICTS else [])]
        return finding.last_step >= min(looks)

    def span(self, finding: Finding) -> str:
        """When it was seen, in words."""
        if self.goes_on(finding) and self.steps > 1:
            return f"since step {finding.first_step:,}"
        if finding.first_step == finding.last_step:
            return f"step {finding.first_step:,}"
        return f"steps {finding.first_step:,}–{finding.last_step:,}"

    def fails(self, severity: str) -> bool:
        """True when a finding, or the verdict of a check, is at least that severe; ``"never"`` never is."""
        if severity == "never":
            return False
        least = SEVERITIES.index(severity)
        # Whoever saved only the check columns is told all the same.
        wrong = any(check.verdict in ERROR_FINDINGS[:2] for result in self.checks for check in result.checks)
        return wrong or any(SEVERITIES.index(finding.severity) >= least for finding in self.findings)


def account_of(frame: pd.DataFrame) -> Account:
    """What a history frame tells of its run.

    Args:
        frame: a history frame; its ``attrs`` may come from a stranger's file.

    Returns:
        The account; empty for an empty frame.

    Raises:
        ValueError: ``attrs`` hold findings or numbers in a form that is not ours.

    Example:
        >>> from keras_gradwatch.history import History
        >>> print(account_of(History((), {}).to_frame()).summary())
        GradWatch   0 steps · no tensors · not checked
        ? nothing was tracked: no training step was seen
        ? no gradient check was made: nothing here says whether the gradients are right
    """
    attributes = {str(name): value for name, value in frame.attrs.items()}
    findings = findings_of(attributes) if "findings" in attributes else _findings_in_rows(frame)
    attributes.pop("findings", None)
    cost = _numbers(attributes.pop("cost", {}))
    tensors = _tensors(frame, _strings(attributes.pop("layer_classes", {})))
    check_steps, checks = _checks(frame, tensors, _strings(attributes.pop("reasons", {})))
    steps = attributes.pop("steps", 0)
    return Account(
        steps=max(int(frame["step"].max()) if len(frame) else 0, steps if isinstance(steps, int) else 0),
        tensors=tensors,
        findings=findings,
        check_steps=check_steps,
        checks=checks,
        cost=cost,
        attributes=attributes,
    )


def _tensors(frame: pd.DataFrame, classes: Mapping[str, str]) -> tuple[TensorInfo, ...]:
    """The distinct tensors, inputs first, otherwise as they first appear, which is network order."""
    rows = _first_rows(frame)
    columns = {name: frame[name].iloc[rows].tolist() for name in ("role", "layer", "tensor", "depth", "size")}
    tensors = [
        TensorInfo(
            layer=str(layer), tensor=str(tensor), role="input" if role == "input" else "weight", depth=int(depth),
            shape=(int(size),), layer_class=classes.get(str(layer), ""),
        )
        for role, layer, tensor, depth, size in zip(*columns.values(), strict=True)
    ]  # fmt: skip
    return tuple(sorted(tensors, key=lambda tensor: tensor.role == "weight"))


def _first_rows(frame: pd.DataFrame) -> npt.NDArray[np.intp]:
    """Index of the first row of each (role, layer, tensor)."""
    identity = np.zeros(len(frame), np.int64)
    for name in ("role", "layer", "tensor"):
        codes, names = codes_of(frame[name])
        identity = identity * (len(names) + 1) + codes + 1
    codes, distinct = pd.factorize(identity)
    first = np.empty(len(distinct), np.intp)
    first[codes[::-1]] = np.arange(len(codes))[::-1]  # of several assignments the last one stays
    return np.sort(first)


def _checks(
    frame: pd.DataFrame, tensors: tuple[TensorInfo, ...], reasons: Mapping[str, str]
) -> tuple[tuple[int, ...], tuple[CheckResult, ...]]:
    rows = frame[frame["check"].notna().to_numpy()]
    names = ("role", "layer", "tensor", "check", "check_error", "check_bar", "rounding_error")
    known = {(str(tensor.role), tensor.layer, tensor.tensor): tensor for tensor in tensors}
    by_step: dict[int, list[tuple[TensorInfo, TensorCheck]]] = {}
    for step, *values in zip(rows["step"].tolist(), *(rows[name].tolist() for name in names), strict=True):
        role, layer, tensor, verdict, error, bar, rounding_error = values
        check = TensorCheck(
            tensor=str(tensor), verdict=str(verdict), error=float(error), bar=float(bar),
            rounding_error=float(rounding_error), reason="" if verdict == "ok" else reasons.get(str(tensor), ""),
        )  # fmt: skip
        by_step.setdefault(int(step), []).append((known[str(role), str(layer), str(tensor)], check))
    results = [
        CheckResult(tensors=tuple(info for info, _ in pairs), checks=tuple(check for _, check in pairs))
        for _, pairs in sorted(by_step.items())
    ]
    return tuple(sorted(by_step)), tuple(results)


def _findings_in_rows(frame: pd.DataFrame) -> tuple[Finding, ...]:
    """One finding per name in the column ``findings``: all that a frame without ``attrs`` tells."""
    codes, texts = pd.factorize(frame["findings"])
    names = dict.fromkeys(name for text in texts for name in str(text).split(",") if name)
    found = list[Finding]()
    for name in sorted(names, key=lambda name: FINDINGS.index(name) if name in FINDINGS else len(FINDINGS)):
        marked = np.isin(codes, [i for i, text in enumerate(texts) if name in str(text).split(",")])
        rows = frame[["step", "layer", "tensor"]][marked]
        found.append(
            Finding(
                finding=name, layer="loss" if name in ON_THE_LOSS else str(rows["layer"].iloc[0]),
                first_step=int(rows["step"].min()), last_step=int(rows["step"].max()),
                severity="error" if name in ERROR_FINDINGS else "warning",
                message=_TOLD_WITHOUT, tensors=tuple(str(tensor) for tensor in rows["tensor"].unique()),
            )
        )  # fmt: skip
    return tuple(found)


def findings_of(attributes: Mapping[str, Any]) -> tuple[Finding, ...]:
    """The findings that ``frame.attrs`` holds, as records again.

    Raises:
        ValueError: they have an unknown form.
    """
    return tuple(_finding(entry) for entry in _listed(attributes.get("findings", ())))


def _finding(entry: object) -> Finding:
    """A finding from a file, every field made sure of."""
    if not isinstance(entry, Mapping) or not {"finding", "layer", "first_step", "last_step", "message"} <= set(entry):
        raise _foreign("findings", entry)
    severity: object = entry.get("severity", "warning")
    try:
        return Finding(
            finding=str(entry["finding"]), layer=str(entry["layer"]), tensor=str(entry.get("tensor", "")),
            first_step=int(entry["first_step"]), last_step=int(entry["last_step"]),
            severity="error" if severity == "error" else "info" if severity == "info" else "warning",
            value=_number(entry.get("value")), limit=_number(entry.get("limit")),
            message=str(entry["message"]), advice=str(entry.get("advice", "")),
            tensors=tuple(str(name) for name in _listed(entry.get("tensors", ()))),
        )  # fmt: skip
    except (TypeError, ValueError, OverflowError):
        raise _foreign("findings", entry) from None


def _listed(value: object) -> list[object]:
    if not isinstance(value, list | tuple):
        raise _foreign("findings", value)
    return list(value)


def _numbers(value: object) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise _foreign("cost", value)
    return {str(name): _number(number) for name, number in value.items()}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _strings(value: object) -> dict[str, str]:
    return {str(name): str(text) for name, text in value.items()} if isinstance(value, Mapping) else {}


def _foreign(name: str, value: object) -> ValueError:
    return ValueError(
        f"Received a history whose attrs hold {name} of an unknown form: {str(value)[:80]!r}. Expected what "
        "write_history(watch.history, path) writes. Write the file with it."
    )


def verdict_counts(result: CheckResult) -> dict[str, int]:
    """How many tensors of a check have each verdict, most alarming first; verdicts that none has are left out."""
    names = [check.verdict for check in result.checks]
    return {verdict: names.count(verdict) for verdict in VERDICTS if verdict in names}


def worst_checks(account: Account) -> list[tuple[TensorInfo, TensorCheck]]:
    """Each checked tensor with its most alarming check, of equal ones that of the largest error, in network order."""
    worst: dict[TensorInfo, TensorCheck] = {}
    for result in account.checks:
        for info, check in zip(result.tensors, result.checks, strict=True):
            if info not in worst or _alarm(check) > _alarm(worst[info]):
                worst[info] = check
    return [(info, worst[info]) for info in account.tensors if info in worst]


def _alarm(check: TensorCheck) -> tuple[int, float]:
    return -VERDICTS.index(check.verdict), -1.0 if math.isnan(check.error) else check.error
