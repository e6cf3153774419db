"""What a finding of ``stop_on`` does to a training run: it ends it, or takes it back to its last healthy state."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from keras_gradwatch.capture import optimizers_of
from keras_gradwatch.errors import GradientCheckError, GradientError, NonFiniteGradientError
from keras_gradwatch.optimizers import cut_learning_rate, host, learning_rate
from keras_gradwatch.records import CheckResult, Finding
from keras_gradwatch.rollbacks import Rollback
from keras_gradwatch.schedules import WithinBudget
from keras_gradwatch.states import Array, ModelState, metric_variables

#: Findings that going back does not mend, since they lie in the formulas or in how training began: training stops.
BEYOND_ROLLBACK = ("mismatch", "disconnected", "imprecise", "zero_gradient", "vanishing", "stalled")

#: Findings on these are no fault of the learning rate, which is then left alone.
_DATA = ("data", "labels", "sample_weight")

_KEPT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """One action taken.

    Attributes:
        step: step at which it was taken.
        action: what was done; ``"stop"`` may follow upon going back, too.
        finding: what called for it.
        words: all of it in one sentence; empty for ``"raise"``, whose error says it.
        to_step: the step whose state was restored; ``None`` when none was.
        learning_rates_before, learning_rates: of every optimizer.
    """

    step: int
    action: Literal["stop", "raise", "rollback"]
    finding: Finding
    words: str
    to_step: int | None = None
    learning_rates_before: tuple[float, ...] = ()
    learning_rates: tuple[float, ...] = ()

    @property
    def restored(self) -> bool:
        """Whether the model is in an earlier state now."""
        return self.to_step is not None


class Actions:
    """Carries out the action of one run, and keeps account of what it did.

    Args:
        model: the model in training.
        stop_on: names of findings that call for the action.
        action: ``"stop"``, ``"raise"``, ``"rollback"`` or a :class:`Rollback`.
        retrace: called when a schedule was cut, which a compiled step holds inside it.
    """

    def __init__(
        self, model: Any, stop_on: tuple[str, ...], action: str | Rollback, *,
        retrace: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._model, self._stop_on, self._retrace = model, stop_on, retrace
        self._rollback = action if isinstance(action, Rollback) else Rollback() if action == "rollback" else None
        self._name = action
        self._states: list[ModelState] = []
        self._metrics: list[Array] | None = None
        self._budget = WithinBudget(share=self._rollback.share if self._rollback else 1.0)
        self._clock, self._times = time.perf_counter(), 0
        self.deeds: list[Deed] = []

    @property
    def notes(self) -> list[str]:
        """One sentence for each action taken."""
        return [deed.words for deed in self.deeds if deed.action != "raise"]

    def account(self) -> list[dict[str, Any]]:
        """Each action taken, fit for JSON."""
        return [
            {"step": deed.step, "action": deed.action, "finding": deed.finding.finding, "layer": deed.finding.layer,
             "to_step": deed.to_step, "learning_rates_before": list(deed.learning_rates_before),
             "learning_rates": list(deed.learning_rates)}
            for deed in self.deeds
        ]  # fmt: skip

    def keep(self, step: int, active: Sequence[Finding]) -> None:
        """Copy the state if it is healthy and time allows; nothing unless the action is to roll back.

        Args:
            step: steps done in this run.
            active: findings that hold now.
        """
        if self._rollback is None or self._times > self._rollback.times:
            return
        self.keep_metrics()
        now = time.perf_counter()
        self._budget.record(0.0, now - self._clock)
        if self._budget.due(step + 1, False) and not any(f.finding in self._stop_on for f in active):
            state = ModelState.of(self._model, step=step)
            if state.is_finite and state.fits(self._model):
                # The one before stays: what is found late may have begun before the newest copy.
                self._states = [*self._states[-(_KEPT - 1) :], state]
            self._budget.record(time.perf_counter() - now, 0.0)
        self._clock = time.perf_counter()

    def keep_metrics(self) -> None:
        """Copy the running means, a few numbers; nothing unless the action is to roll back."""
        if self._rollback is not None:
            self._metrics = [host(variable) for variable in metric_variables(self._model)]

    def begin_epoch(self) -> None:
        """The metrics start afresh."""
        self._metrics = None

    def answer(self, new: Sequence[Finding], *, step: int, offset: int, ended: bool) -> Deed | None:
        """Do what the findings call for.

        Args:
            new: findings told for the first time.
            step: steps done in this run.
            offset: optimizer steps done before it; findings and deeds count these, too.
            ended: training is over: nothing is taken back any more, other callbacks may have put weights in place.

        Returns:
            What was done; ``None`` when nothing was called for. The error of ``"raise"`` is left to the caller.
        """
        reason = next((finding for finding in new if finding.finding in self._stop_on), None)
        if reason is None:
            return None
        deed = None
        if self._rollback is not None and not ended and reason.finding not in BEYOND_ROLLBACK:
            deed = self._go_back(reason, self._rollback, offset + step, offset)
        if deed is None:
            words = f"step {offset + step}: training stopped by {reason.finding} in {reason.layer}"
            words += self._why_not(reason, ended=ended) if self._rollback is not None else ""
            action: Any = "raise" if self._name == "raise" else "stop"
            deed = Deed(step=offset + step, action=action, finding=reason, words=words)
        if deed.action != "rollback":
            self._model.stop_training = True
        self.deeds.append(deed)
        return deed

    def _why_not(self, finding: Finding, *, ended: bool) -> str:
        if ended:
            return ", at its end: nothing is taken back"
        if finding.finding in BEYOND_ROLLBACK:
            return ": going back does not mend it"
        return ": there is no healthy state to go back to"

    def _go_back(self, finding: Finding, rollback: Rollback, step: int, offset: int) -> Deed | None:
        states = [state for state in self._states if state.fits(self._model)]
        if not states:
            return None
        before = [state for state in states if offset + state.step < finding.first_step]
        state = before[-1] if before else states[0]
        state.restore(self._model)
        self._reset_metrics()
        # If the same happens again before a newer copy is made, the older one is next.
        self._states = [other for other in states if other is not state] or [state]
        self._times += 1
        goes_on = self._times <= rollback.times
        rates = self._learning_rates()
        if goes_on and finding.layer not in _DATA and rollback.factor < 1:
            self._cut(rollback.factor)
        cut = self._learning_rates()
        change = ", ".join(f"{a:.3g} → {b:.3g}" for a, b in dict.fromkeys(zip(rates, cut, strict=True)) if a != b)
        words = f"step {step}: {finding.finding} in {finding.layer}, back to the state after step {offset + state.step}"
        if goes_on:
            words += f", learning rate {change or 'unchanged'} ({self._times} of {rollback.times})"
        else:
            words += f", training stopped: it had gone back {rollback.times} times already"
        return Deed(
            step=step, action="rollback" if goes_on else "stop", finding=finding, words=words,
            to_step=offset + state.step, learning_rates_before=rates, learning_rates=cut,
        )  # fmt: skip

    def _learning_rates(self) -> tuple[float, ...]:
        return tuple(learning_rate(optimizer) for optimizer in optimizers_of(self._model))

    def _cut(self, factor: float) -> None:
        stale = [cut_learning_rate(optimizer, factor) for optimizer in optimizers_of(self._model)]
        if any(stale):
            self._retrace()

    def _reset_metrics(self) -> None:
        """Running means without the bad batch: as last copied in this epoch, else from the next batch on."""
        variables = metric_variables(self._model)
        if self._metrics is None or len(self._metrics) != len(variables):
            self._model.reset_metrics()
            return
        for variable, value in zip(variables, self._metrics, strict=True):
            variable.assign(value)


def error_of(finding: Finding, check: CheckResult | None) -> GradientError:
    """The exception that ``action="raise"`` raises for a finding."""
    text = f"{finding.finding} in {finding.layer} at step {finding.first_step}: {finding.message}"
    text += f" {finding.advice}" if finding.advice else ""
    kinds = {"nonfinite": NonFiniteGradientError, "mismatch": GradientCheckError}
    return kinds.get(finding.finding, GradientError)(text, finding=finding, result=check)
