"""One check of one traced model: from slopes to a verdict per tensor, with rounding and blame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_gradwatch.blame import Blame
from keras_gradwatch.check import CheckSettings, Line, Outcome, Part, Problem, blank_outcome, check_problem
from keras_gradwatch.places import Place, locate
from keras_gradwatch.precision import lost_words, mode_words
from keras_gradwatch.probe import Subject
from keras_gradwatch.records import CheckResult, Culprit, Float64Array, TensorCheck

#: Relative rounding error beyond which a gradient may be lost, per training dtype: about 1e5 units of rounding for
#: float32 (healthy models: 1e-7…1e-5), 1e2 for the half precisions (healthy: 5e-4…1e-2). Our choice.
_ROUNDING_LIMITS = {"float64": 1e-6, "float32": 1e-2, "float16": 0.2, "bfloat16": 0.5}
_UNITS = {"float64": 2.3e-16, "float32": 6e-8, "float16": 5e-4, "bfloat16": 4e-3}

#: An error is lost by the arithmetic when it is this many times what rounding weights and inputs alone would cause: a
#: forward and backward pass rounds some tens of times; a formula that cancels loses 1e3 and more. Our choice.
_BEYOND_ROUNDING = 100.0

#: A gradient that moves the loss by less than this share over the tensor's whole size trains nothing, however exact it
#: is: its rounding is not worth an alarm (saturated units give 1e-10 and less). Our choice.
_IDLE = 1e-6

#: A wrong tensor whose bar is wider than this was judged with long steps. A usual bar is 1e-6…1e-5. Our choice.
_FAINT = 1e-4

#: Wrong tensors, nearest the loss, in which single entries are looked for: about 100 losses each.
_LOCATED = 6


class PointProblem:
    """A traced point as the :class:`~keras_gradwatch.check.Problem` the check knows."""

    def __init__(self, point: Any, floor: float = 0.0) -> None:
        self.point = point
        self.loss = point.loss
        summary = point.summaries
        self.norms: Float64Array = np.nan_to_num(summary[:, 1], nan=np.inf, posinf=np.inf)
        self.nonfinite: Float64Array = summary[:, 2]
        self.sizes: Float64Array = np.array(point.traced.sizes, dtype=float)
        rms = summary[:, 0]
        typical = rms[(rms > 0) & np.isfinite(rms)]
        self.floor = floor or 0.05 * (float(np.median(typical)) if len(typical) else 1.0)
        self.scales: Float64Array = np.maximum(np.nan_to_num(rms), self.floor)

    def line(self, seed: int, part: Part | None = None) -> Line:
        """Fresh directions through the point."""
        line: Line = self.point.line(seed, part)
        return line

    def jittered(self, size: float, seed: int) -> Problem:
        """The same scalar nearby."""
        return PointProblem(self.point.moved(size * self.scales, seed), self.floor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of one check.

    Attributes:
        subject: the scalar, its tensors and its model.
        shadow, training: its traced programs in float64 and in the training dtype (times a loss scale).
        wrt: ``"weights"`` and/or ``"inputs"``.
        surrogates: names or paths of layers allowed to differ.
        settings: numbers behind the verdicts.
        seed: of the directions.
        rounding: compare with the gradient in the training dtype, too: a third of what a healthy later check costs.
        locate: find the entries that are wrong inside a wrong tensor.
    """

    subject: Subject
    shadow: Any
    training: Any
    wrt: tuple[str, ...]
    surrogates: tuple[str, ...]
    settings: CheckSettings
    seed: int
    rounding: bool = True
    locate: bool = False


class Answer:
    """One check of one traced model: float64 point, verdicts, rounding, blame."""

    def __init__(self, question: Question, values: tuple[list[Any], list[Any]]) -> None:
        self.question = question
        self.subject, self.shadow, self.training = question.subject, question.shadow, question.training
        self.settings, self.seed = question.settings, question.seed
        self.values = self.shadow.feed(*values)
        self.point = self.shadow.main.point(*self.values)
        self.problem = PointProblem(self.point)
        self.blame = Blame(self.subject, self.shadow, self.values, self.seed, self.settings, PointProblem)

    def result(self) -> CheckResult:
        """Verdicts per tensor and the culprits behind them."""
        leaks = self.shadow.leaks
        connected = np.array(self.shadow.connected, dtype=bool)
        finite = np.isfinite(self.problem.norms) & (self.problem.nonfinite == 0)
        usable = finite & np.array([not leak for leak in leaks], dtype=bool) & self._wanted()
        evaluations = 0
        outcome = blank_outcome(len(leaks))
        if np.isfinite(self.problem.loss):
            outcome = check_problem(self.problem, self.seed, self.settings, candidates=usable)
            evaluations = outcome.evaluations
        checks = [self._tensor(i, outcome, leaks[i], bool(connected[i]), bool(finite[i])) for i in range(len(leaks))]
        checks = self._declare(checks, usable)
        checks = self._round(checks) if self.question.rounding else checks
        checks = self._modes(checks)
        culprits = self._culprits(checks)
        checks = _corroborated(checks, culprits)
        checks, culprits = self._surrogates(checks, culprits)
        checks, places = self._located(checks) if self.question.locate else (checks, [])
        evaluations += self.blame.evaluations + sum(place.evaluations for place in places)
        kept = [i for i, wanted in enumerate(self._wanted()) if wanted]
        return CheckResult(
            tensors=tuple(self.subject.tensors[i] for i in kept), checks=tuple(checks[i] for i in kept),
            culprits=tuple(culprits), loss=self.problem.loss, evaluations=evaluations, awake=outcome.awake,
            evidence=tuple(each for place in places for each in place.evidence),
        )  # fmt: skip

    def _wanted(self) -> npt.NDArray[np.bool_]:
        roles = {"weights": "weight", "inputs": "input"}
        wanted = {roles[name] for name in self.question.wrt}
        return np.array([info.role in wanted for info in self.subject.tensors], dtype=bool)

    def _tensor(self, i: int, outcome: Outcome, leak: str, connected: bool, finite: bool) -> TensorCheck:
        info = self.subject.tensors[i]
        verdict, reason = outcome.verdicts[i], outcome.reasons[i]
        if not finite or not np.isfinite(self.problem.loss):
            what = "its gradient" if not finite else "the loss"
            verdict, reason = "nonfinite", f"{what} holds NaN or Inf"
        elif leak:
            verdict, reason = "inconclusive", f"not float64 all the way: {leak}"
        elif not connected and verdict in ("zero", "ok", "inconclusive", ""):
            verdict, reason = "disconnected", self.blame.cut_reason(i)
        elif verdict == "mismatch" and self.shadow.hidden_stops[i]:
            verdict, reason = (
                "inconclusive",
                "a stop_gradient inside a loop cannot be held constant on the numeric side",
            )
        elif info.size == 0:
            verdict, reason = "zero", "the tensor is empty"
        return TensorCheck(
            tensor=info.tensor, verdict=verdict or "inconclusive", error=float(outcome.errors[i]),
            bar=float(outcome.bars[i]), factor=float(outcome.factors[i]), reason=reason,
        )  # fmt: skip

    def _declare(self, checks: list[TensorCheck], usable: npt.NDArray[np.bool_]) -> list[TensorCheck]:
        """``ok`` becomes ``declared`` where the code's own stop_gradient makes gradient and plain slope differ."""
        if not self.shadow.declares or not np.isfinite(self.problem.loss):
            return checks
        differs = self.blame.declared(self.problem, usable)
        reason = "gradient and plain slope differ because the code says stop_gradient; right with that held constant"
        return [
            replace(c, verdict="declared", reason=f"{reason}{self.blame.stop_place(i)}")
            if c.verdict == "ok" and differs[i]
            else c
            for i, c in enumerate(checks)
        ]

    def _round(self, checks: list[TensorCheck]) -> list[TensorCheck]:
        """Add the rounding error of the training dtype; ``ok`` becomes ``imprecise`` where it loses the gradient."""
        if not np.isfinite(self.problem.loss) or self.shadow.draws:
            return checks  # draws past Keras' seeds differ between two traces: nothing could be compared
        dtype = self._training_dtype()
        scale = _loss_scale(self.subject.root)
        # From the float64 values, which hold those of the training dtype exactly and are on the device already.
        values = self.training.feed(self.values[0], [*self.values[1], np.asarray(scale, np.float32)])
        lower = self.training.main.point(*values)
        distance = self.point.difference(lower, scale)
        summary = lower.summaries
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = np.where(self.problem.norms > 0, distance / self.problem.norms, np.nan)
        lossy = [
            i for i, c in enumerate(checks)
            if (c.verdict == "ok" and not (np.nan_to_num(errors[i], nan=0.0, posinf=np.inf) <= _ROUNDING_LIMITS[dtype]))
            or (c.verdict == "ok" and summary[i, 2] > 0)
        ]  # fmt: skip
        inherent = self._inherent(dtype) if lossy else np.zeros(len(checks))
        effect = self.problem.norms * self.problem.scales * np.sqrt(self.problem.sizes)
        matters = effect > _IDLE * abs(self.problem.loss)
        found = []
        for i, check in enumerate(checks):
            check = replace(check, rounding_error=float(errors[i]))
            beyond = summary[i, 2] > 0 or (distance[i] > _BEYOND_ROUNDING * inherent[i] and matters[i])
            if i in lossy and beyond:
                exact, low = (np.asarray(p.gradients[i], np.float64) for p in (self.point, lower))
                check = replace(check, verdict="imprecise", reason=lost_words(exact, low / scale, dtype))
            found.append(check)
        return found

    def _modes(self, checks: list[TensorCheck]) -> list[TensorCheck]:
        """Say where XLA gives another gradient; looked at only where something is lost or not finite already."""
        lost = [i for i, check in enumerate(checks) if check.verdict in ("nonfinite", "imprecise")]
        if not lost or self.shadow.draws:
            return checks
        scale = _loss_scale(self.subject.root)
        values = self.training.feed(self.values[0], [*self.values[1], np.asarray(scale, np.float32)])
        compiled = self.training.compiled_summaries(*values)
        if compiled is None:
            return checks
        plain = self.training.main.point(*values).summaries
        jit = bool(getattr(self.subject.root, "jit_compile", False))
        words = {i: mode_words(plain[i, 1:], compiled[i, 1:], jit) for i in lost}
        return [
            replace(check, reason="; ".join(filter(None, (check.reason, words.get(i, "")))))
            for i, check in enumerate(checks)
        ]

    def _inherent(self, dtype: str) -> Float64Array:
        """How far the float64 gradient itself moves when weights and inputs are rounded to the training dtype.

        A gradient near convergence is the difference of large equal terms: no float32 formula could do better, and
        nothing is wrong. Only an error well beyond this one is lost by the arithmetic.
        """
        sizes = _UNITS[dtype] * self.problem.scales
        moved = [self.point.difference(self.point.moved(sizes, self.seed + 99 + k)) for k in range(3)]
        largest: Float64Array = np.nan_to_num(np.max(moved, axis=0))
        return largest

    def _training_dtype(self) -> str:
        dtypes = {getattr(layer, "compute_dtype", None) for layer in self.subject.layers}
        for name in ("bfloat16", "float16", "float32"):
            if name in dtypes:
                return name
        return "float64"

    def _culprits(self, checks: list[TensorCheck]) -> list[Culprit]:
        verdicts = [check.verdict for check in checks]
        culprits: list[Culprit] = []
        if "nonfinite" in verdicts:
            culprits += self.blame.nonfinite(self.problem.loss)
        if "mismatch" in verdicts:
            culprits += self.blame.mismatch()
        if "disconnected" in verdicts:
            culprits += self.blame.cuts([i for i, v in enumerate(verdicts) if v == "disconnected"])
        return culprits

    def _located(self, checks: list[TensorCheck]) -> tuple[list[TensorCheck], list[Place]]:
        """The entries that are wrong in the wrong tensors nearest the loss."""
        wrong = [i for i, check in enumerate(checks) if check.verdict == "mismatch"][-_LOCATED:]
        places = [
            locate(self.problem, i, checks[i].tensor, self.subject.tensors[i].shape, self.settings, self.seed)
            for i in wrong
        ]
        for i, place in zip(wrong, places, strict=True):
            reason = "; ".join(filter(None, (checks[i].reason, place.words)))
            checks = [*checks[:i], replace(checks[i], reason=reason), *checks[i + 1 :]]
        return checks, places

    def _surrogates(
        self, checks: list[TensorCheck], culprits: list[Culprit]
    ) -> tuple[list[TensorCheck], list[Culprit]]:
        """Mismatches explained by layers the user named become ``declared``."""
        named = [c for c in culprits if c.kind == "backward" and _named(c.layer, self.question.surrogates)]
        others = [c for c in culprits if c not in named]
        wrong = [c for c in others if c.kind == "backward" and np.isfinite(c.error)]
        if not named or wrong:
            return checks, others if named else culprits
        reason = f"differs on purpose: layer {named[0].layer} is named in surrogates"
        declared = [replace(c, verdict="declared", reason=reason) if c.verdict == "mismatch" else c for c in checks]
        return declared, others


def _corroborated(checks: list[TensorCheck], culprits: Sequence[Culprit]) -> list[TensorCheck]:
    """A faint ``mismatch`` that no layer bears out is ``inconclusive``.

    By the chain rule a gradient can only be wrong where some layer's own backward, or the loss's, is wrong, and all of
    them were tried alone. A tensor that hardly moves the loss is judged with long steps, and those cross kinks.
    """
    if any(culprit.kind == "backward" for culprit in culprits):
        return checks
    reason = "differs, but every layer alone is right: kinks within the long steps that its faint part needs"
    return [
        replace(c, verdict="inconclusive", reason=reason, factor=float("nan"))
        if c.verdict == "mismatch" and not c.bar <= _FAINT
        else c
        for c in checks
    ]


def calm_rounding(result: CheckResult) -> bool:
    """Rounding was measured, and lies a hundredfold below the strictest limit of a training dtype, 1 %."""
    errors = [check.rounding_error for check in result.checks if np.isfinite(check.rounding_error)]
    return bool(errors) and max(errors) <= 1e-2 * _ROUNDING_LIMITS["float32"] and result.verdict != "imprecise"


def _named(layer: str, surrogates: Sequence[str]) -> bool:
    return any(layer == name or layer.split("/")[-1] == name or layer.startswith(f"{name}/") for name in surrogates)


def _loss_scale(root: Any) -> float:
    """The factor a LossScaleOptimizer puts on the loss, 1.0 without one."""
    scale = getattr(getattr(root, "optimizer", None), "dynamic_scale", None)
    return float(np.asarray(scale)) if scale is not None else 1.0
