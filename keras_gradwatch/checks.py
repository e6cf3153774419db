"""One call that says whether a backward pass is right: :func:`check_gradients` and :func:`check_layer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from keras_gradwatch.backends import program_backend
from keras_gradwatch.blame import Blame
from keras_gradwatch.check import CheckSettings, Line, Outcome, Part, Problem, blank_outcome, check_problem
from keras_gradwatch.errors import GradientCheckError, gist
from keras_gradwatch.history import check_frame
from keras_gradwatch.probe import (
    Batch,
    Subject,
    arrays_of,
    batch_of,
    describe_weights,
    has_loss,
    layer_subject,
    model_subject,
    prepare_layer,
    prepare_model,
    trains_compiled_loss,
)
from keras_gradwatch.records import CheckResult, Culprit, Float64Array, TensorCheck, TensorInfo
from keras_gradwatch.shadow import float64_shadow

if TYPE_CHECKING:
    import pandas as pd

#: Verdicts that make a report not ``ok``.
_FAILURES = frozenset({"mismatch", "nonfinite", "imprecise", "inconclusive", "disconnected"})

#: Relative rounding error beyond which a gradient may be lost, per training dtype: about 1e5 units of rounding for
#: float32 (healthy models: 1e-7…1e-5), 1e2 for the half precisions (healthy: 5e-4…1e-2). Our choice.
_ROUNDING_LIMITS = {"float64": 1e-6, "float32": 1e-2, "float16": 0.2, "bfloat16": 0.5}
_UNITS = {"float64": 2.3e-16, "float32": 6e-8, "float16": 5e-4, "bfloat16": 4e-3}

_OTHER_LOSS = "train_step is overridden and does not call compute_loss: the compiled loss is not what it trains"

#: An error is lost by the arithmetic when it is this many times what rounding weights and inputs alone would cause: a
#: forward and backward pass rounds some tens of times; a formula that cancels loses 1e3 and more. Our choice.
_BEYOND_ROUNDING = 100.0

#: A gradient that moves the loss by less than this share over the tensor's whole size trains nothing, however exact it
#: is: its rounding is not worth an alarm (saturated units give 1e-10 and less). Our choice.
_IDLE = 1e-6

#: A wrong tensor whose bar is wider than this was judged with long steps. A usual bar is 1e-6…1e-5. Our choice.
_FAINT = 1e-4


class GradientReport:
    """What a gradient check found: prints as a summary, shows as a table in notebooks.

    Attributes:
        result: every number, as a :class:`~keras_gradwatch.records.CheckResult`.
    """

    def __init__(self, result: CheckResult) -> None:
        self.result = result

    @property
    def verdict(self) -> str:
        """The most alarming verdict of any tensor."""
        return self.result.verdict

    @property
    def ok(self) -> bool:
        """True when every tensor was certified, or is zero, on a kink, or declared to differ."""
        return (
            self.result.awake
            and not any(check.verdict in _FAILURES for check in self.result.checks)
            and bool(self.result.checks)
        )

    @property
    def frame(self) -> pd.DataFrame:
        """One row per tensor: layer, tensor, verdict, error, bar, rounding error, factor, reason."""
        return check_frame(self.result)

    def raise_if_failed(self) -> None:
        """Raise when the check did not pass.

        Raises:
            GradientCheckError: :attr:`ok` is False; the message is the printed report.
        """
        if not self.ok:
            raise GradientCheckError(str(self), result=self.result)

    def __str__(self) -> str:
        from keras_gradwatch.summary import render_check

        return render_check(self.result)

    def __repr__(self) -> str:
        return f"<GradientReport {self.verdict}: {len(self.result.checks)} tensors>"

    def _repr_html_(self) -> str:
        import html

        return f"<pre>{html.escape(str(self))}</pre>" + str(self.frame.to_html(index=False))


def check_gradients(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    wrt: Sequence[str] = ("weights", "inputs"),
    training: bool = True,
    surrogates: Sequence[str] = (),
    seed: int = 0,
) -> GradientReport:
    """Whether a compiled model's gradients are the slopes of its loss, tensor by tensor, with error bars.

    The loss is the one ``fit`` minimises (sample weights, ``add_loss`` and regularisers included), evaluated in
    float64 on this batch; BatchNorm and Dropout run in training mode with the masks the next step will see. Nothing
    about the model changes.

    Args:
        model: a compiled ``keras.Model``.
        x: inputs, as for ``fit``: array ``[batch, ...]``, list or dict of arrays. Keep the batch small (8 is plenty).
        y: targets, as for ``fit``.
        sample_weight: weights per sample, shape ``[batch]`` or as for ``fit``.
        wrt: what to differentiate by: ``"weights"``, ``"inputs"`` or both.
        training: call the model in training mode.
        surrogates: names or paths of layers whose backward differs from the forward on purpose.
        seed: of the random directions.

    Returns:
        The report; ``report.ok`` is True only when every tensor was certified.

    Raises:
        TypeError: ``model`` is not a Keras model, or the data are not numbers.
        ValueError: the model is not compiled, the batch is empty, or ``wrt`` holds something else.

    References:
        Design and calibration: ``docs/checker.md``. The comparison of one directional derivative is the classic
        gradient check (Gill, Murray and Wright, 1981, section 8.1); error bars and splitting are ours.
    """
    _check_wrt(wrt)
    batch = arrays_of(batch_of((x, y, sample_weight)))
    prepare_model(model, batch)
    checker = Checker(model, training=training, surrogates=surrogates, wrt=wrt)
    return GradientReport(checker.check(batch, seed=seed))


def check_layer(layer: Any, x: Any, *, training: bool = True, seed: int = 0) -> GradientReport:
    """Whether one layer's backward pass is right, with respect to its weights and its float inputs.

    Args:
        layer: any ``keras.Layer``; it is built if it is not.
        x: what the layer is called with: an array ``[batch, ...]``, a list or dict of them (one argument), a tuple of
            them (several positional arguments), or a ``keras.KerasTensor``/``keras.InputSpec``/shape, for which
            standard normal data are drawn (``None`` becomes 4).
        training: call the layer in training mode.
        seed: of data, cotangent and directions.

    Returns:
        The report, one row per weight and input.

    Raises:
        TypeError: ``layer`` is not a Keras layer.

    Example:
        ``check_layer(MyLayer(), (8, 16)).raise_if_failed()`` in a test.
    """
    import keras

    if not isinstance(layer, keras.layers.Layer):
        raise TypeError(f"got an object of type {type(layer).__name__}; expected a keras.Layer")
    data = _layer_data(x, seed)
    batch = arrays_of(Batch(data))
    prepare_layer(layer, batch)
    subject = layer_subject(layer, batch, training=training, seed=seed)
    return GradientReport(Checker(layer, subject=subject).check(batch, seed=seed))


class Checker:
    """Checks one model again and again: the traced programs are kept between calls.

    Args:
        root: the model (or layer).
        training: mode in which it is called.
        surrogates: names or paths of layers allowed to differ.
        wrt: ``"weights"`` and/or ``"inputs"``.
        subject: what to check; by default the compiled loss of the model.
        settings: numbers behind the verdicts.
    """

    def __init__(
        self,
        root: Any,
        *,
        training: bool = True,
        surrogates: Sequence[str] = (),
        wrt: Sequence[str] = ("weights", "inputs"),
        subject: Subject | None = None,
        settings: CheckSettings | None = None,
    ) -> None:
        self.root, self.training, self.surrogates, self.wrt = root, training, tuple(surrogates), tuple(wrt)
        self.settings = settings or CheckSettings()
        self._subject = subject
        self._programs: dict[Any, tuple[Subject, Any, Any, str]] = {}
        self._compiled = True if subject is not None else trains_compiled_loss(root)

    def check(self, batch: Batch, *, seed: int = 0, weights: Sequence[Any] | None = None) -> CheckResult:
        """One check of the gradients on a batch (at other weights than the present ones if given)."""
        if not self._compiled and not has_loss(self.root):
            weights_only = tuple(info for info, _ in describe_weights(self.root))
            return _untraceable(weights_only, f"{_OTHER_LOSS}, and compile was given no loss")
        subject, shadow, training, failure = self._traced(batch)
        if shadow is None:
            return _untraceable(subject.tensors, failure)
        run = _Run(self, subject, shadow, training, batch, seed, weights)
        result = run.result()
        if not self._compiled:
            checks = tuple(
                replace(c, verdict="inconclusive", reason=_OTHER_LOSS) if c.verdict in ("ok", "zero", "kink") else c
                for c in result.checks
            )
            result = replace(result, checks=checks, notes=(*result.notes, _OTHER_LOSS))
        return result

    def gradients(self, batch: Batch) -> tuple[Subject, Any]:
        """Subject and point (loss, gradients) of a batch in the training dtype, for when a step hides its own."""
        subject, _, training, failure = self._traced(batch)
        if training is None:
            raise RuntimeError(failure)
        moving, fixed = subject.values(batch)
        values = training.feed(moving, [*fixed, np.float32(1.0)])
        return subject, training.main.point(*values)

    def diagnose(self, batch: Batch, weights: Mapping[int, Any]) -> tuple[Culprit, ...]:
        """What makes a step's values NaN or Inf, found by running its batch again in the training dtype.

        Args:
            batch: the whole batch of the step.
            weights: values from before the step, by ``id`` of the Keras variable; missing ones are as they are now.

        Returns:
            The culprit; empty when everything is finite this time.
        """
        subject = model_subject(self.root, batch, training=self.training)
        values = [weights.get(id(variable), variable.value) for variable in subject.variables]
        moving, fixed = subject.values(batch, values)
        program = program_backend().Program(subject.loss, moving, fixed, None)
        fed = program.feed(moving, fixed)
        point = PointProblem(program.main.point(*fed))
        if np.isfinite(point.loss) and not point.nonfinite.any():
            return ()
        return tuple(Blame(self.root, subject, program, fed, 0, self.settings, PointProblem).nonfinite(point.loss))

    def _traced(self, batch: Batch) -> tuple[Subject, Any, Any, str]:
        key = batch.signature
        if key not in self._programs:
            subject = self._subject or model_subject(self.root, batch, training=self.training)
            backend = program_backend()
            moving, fixed = subject.values(batch)
            training = backend.Program(_scaled(subject.loss), moving, [*fixed, np.float32(1.0)], None)
            shadow, failure = None, ""
            try:
                with float64_shadow(subject.layers, subject.losses, [*subject.variables, *subject.state]):
                    shadow = backend.Program(subject.loss, moving, fixed, "float64")
            except Exception as error:  # noqa: BLE001  user code that cannot run in float64 is a verdict, not a crash
                where = backend.location_of(error)
                failure = f"the model cannot run in float64: {gist(error)}" + (f" (at {where})" if where else "")
            self._programs[key] = (subject, shadow, training, failure)
        return self._programs[key]


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


class _Run:
    """One check: float64 point, verdicts, rounding, blame."""

    def __init__(
        self, checker: Checker, subject: Subject, shadow: Any, training: Any, batch: Batch, seed: int, weights: Any
    ) -> None:
        self.checker, self.subject, self.shadow, self.training, self.seed = checker, subject, shadow, training, seed
        self.raw = subject.values(batch, weights)
        self.values = shadow.feed(*self.raw)
        self.point = shadow.main.point(*self.values)
        self.problem = PointProblem(self.point)
        self.blame = Blame(checker.root, subject, shadow, self.values, seed, checker.settings, PointProblem)

    def result(self) -> CheckResult:
        leaks = self.shadow.leaks
        connected = np.array(self.shadow.connected, dtype=bool)
        finite = np.isfinite(self.problem.norms) & (self.problem.nonfinite == 0)
        usable = finite & np.array([not leak for leak in leaks], dtype=bool) & self._wanted()
        evaluations = 0
        outcome = blank_outcome(len(leaks))
        if np.isfinite(self.problem.loss):
            outcome = check_problem(self.problem, self.seed, self.checker.settings, candidates=usable)
            evaluations = outcome.evaluations
        checks = [self._tensor(i, outcome, leaks[i], bool(connected[i]), bool(finite[i])) for i in range(len(leaks))]
        checks = self._declare(checks, usable)
        checks = self._round(checks)
        culprits = self._culprits(checks)
        checks = _corroborated(checks, culprits)
        checks, culprits = self._surrogates(checks, culprits)
        kept = [i for i, wanted in enumerate(self._wanted()) if wanted]
        return CheckResult(
            tensors=tuple(self.subject.tensors[i] for i in kept), checks=tuple(checks[i] for i in kept),
            culprits=tuple(culprits), loss=self.problem.loss, evaluations=evaluations + self.blame.evaluations,
            awake=outcome.awake,
        )  # fmt: skip

    def _wanted(self) -> npt.NDArray[np.bool_]:
        roles = {"weights": "weight", "inputs": "input"}
        wanted = {roles[name] for name in self.checker.wrt}
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
        scale = _loss_scale(self.checker.root)
        values = self.training.feed(self.raw[0], [*self.raw[1], np.float32(scale)])
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
            if i in lossy:
                if summary[i, 2] > 0:
                    check = replace(
                        check,
                        verdict="imprecise",
                        reason=f"overflow: {dtype} training gives NaN or Inf, float64 does not",
                    )
                elif distance[i] > _BEYOND_ROUNDING * inherent[i] and matters[i]:
                    why = (
                        "underflow: all of it is flushed to zero" if summary[i, 1] == 0 else "cancellation or underflow"
                    )
                    reason = f"{why} in {dtype}: {errors[i]:.1e} of its norm is lost"
                    check = replace(check, verdict="imprecise", reason=reason)
            found.append(check)
        return found

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

    def _surrogates(
        self, checks: list[TensorCheck], culprits: list[Culprit]
    ) -> tuple[list[TensorCheck], list[Culprit]]:
        """Mismatches explained by layers the user named become ``declared``."""
        named = [c for c in culprits if c.kind == "backward" and _named(c.layer, self.checker.surrogates)]
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


def _untraceable(tensors: tuple[TensorInfo, ...], failure: str) -> CheckResult:
    checks = tuple(TensorCheck(tensor=t.tensor, verdict="inconclusive", reason=failure) for t in tensors)
    return CheckResult(tensors=tensors, checks=checks, notes=(failure,))


def _named(layer: str, surrogates: Sequence[str]) -> bool:
    return any(layer == name or layer.split("/")[-1] == name or layer.startswith(f"{name}/") for name in surrogates)


def _scaled(loss: Callable[[list[Any], list[Any]], Any]) -> Callable[[list[Any], list[Any]], Any]:
    """A loss times the last of its fixed values, as a LossScaleOptimizer asks for."""
    import keras

    def scaled(moving: list[Any], fixed: list[Any]) -> Any:
        value = loss(moving, fixed[:-1])
        return value * keras.ops.cast(fixed[-1], value.dtype)

    return scaled


def _loss_scale(root: Any) -> float:
    """The factor a LossScaleOptimizer puts on the loss, 1.0 without one."""
    scale = getattr(getattr(root, "optimizer", None), "dynamic_scale", None)
    return float(np.asarray(scale)) if scale is not None else 1.0


def _check_wrt(wrt: Sequence[str]) -> None:
    if isinstance(wrt, str) or not wrt or set(wrt) - {"weights", "inputs"}:
        raise ValueError(f"got wrt={wrt!r}; expected a tuple of 'weights' and/or 'inputs'")


def _layer_data(x: Any, seed: int) -> Any:
    """Arrays for ``check_layer``: data as they are, specs and shapes filled with standard normal numbers."""
    import keras

    generator = np.random.default_rng(seed)

    def drawn(shape: Sequence[Any], dtype: str = "float32") -> Any:
        filled = tuple(4 if d is None else int(d) for d in shape)
        if "int" in dtype:
            return generator.integers(0, 2, filled).astype(dtype)
        return generator.standard_normal(filled).astype(dtype)

    def visit(value: Any) -> Any:
        if isinstance(value, keras.KerasTensor):
            return drawn(value.shape, value.dtype)
        if isinstance(value, keras.InputSpec):
            return drawn(value.shape or (4,) * (value.ndim or 2), value.dtype or "float32")
        if isinstance(value, tuple) and value and all(d is None or isinstance(d, int) for d in value):
            return drawn(value)
        if isinstance(value, dict):
            return {key: visit(child) for key, child in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(visit(child) for child in value)
        return value

    return visit(x)
