"""One call that says whether a backward pass is right: :func:`check_gradients` and :func:`check_layer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_gradwatch.backends import program_backend
from keras_gradwatch.blame import Blame
from keras_gradwatch.check import CheckSettings
from keras_gradwatch.errors import GradientCheckError, gist
from keras_gradwatch.halving import dominant_row, faulty_rows, row_words
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
from keras_gradwatch.records import CheckResult, Culprit, TensorCheck, TensorInfo
from keras_gradwatch.shadow import float64_shadow
from keras_gradwatch.verdicts import Answer, PointProblem, Question, calm_rounding

if TYPE_CHECKING:
    import pandas as pd

#: Verdicts that make a report not ``ok``.
_FAILURES = frozenset({"mismatch", "nonfinite", "imprecise", "inconclusive", "disconnected"})

_OTHER_LOSS = "train_step is overridden and does not call compute_loss: the compiled loss is not what it trains"


class GradientReport:
    """What a gradient check found: prints as a table, in colour on a terminal, and shows as one in notebooks.

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
            raise GradientCheckError(f"{self}", result=self.result)

    def __str__(self) -> str:
        from keras_gradwatch.display import show_check

        return show_check(self.result)

    def __format__(self, specification: str) -> str:
        from keras_gradwatch.summary import render_check

        return format(render_check(self.result), specification)

    def __repr__(self) -> str:
        return f"<GradientReport {self.verdict}: {len(self.result.checks)} tensors>"

    def _repr_html_(self) -> str:
        from keras_gradwatch.notebook import check_html

        return check_html(self.result)


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
    locate: bool = False,
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
        locate: also find the worst entries inside wrong tensors (the six nearest the loss): about 100 losses each, in
            ``report.result.evidence``.

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
    return GradientReport(checker.check(batch, seed=seed, locate=locate))


def check_layer(layer: Any, x: Any, *, training: bool = True, seed: int = 0, locate: bool = False) -> GradientReport:
    """Whether one layer's backward pass is right, with respect to its weights and its float inputs.

    Args:
        layer: any ``keras.Layer``; it is built if it is not.
        x: what the layer is called with: an array ``[batch, ...]``, a list or dict of them (one argument), a tuple of
            them (several positional arguments), or a ``keras.KerasTensor``/``keras.InputSpec``/shape, for which
            standard normal data are drawn (``None`` becomes 4).
        training: call the layer in training mode.
        seed: of data, cotangent and directions.
        locate: also find the worst entries inside wrong tensors, as in :func:`check_gradients`.

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
    return GradientReport(Checker(layer, subject=subject).check(batch, seed=seed, locate=locate))


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
        self._passed: set[Any] = set()
        self._calm: set[Any] = set()
        self._compiled = True if subject is not None else trains_compiled_loss(root)

    def check(
        self, batch: Batch, *, seed: int = 0, weights: Sequence[Any] | None = None, locate: bool = False
    ) -> CheckResult:
        """One check of the gradients on a batch (at other weights than the present ones if given)."""
        if not self._compiled and not has_loss(self.root):
            weights_only = tuple(info for info, _ in describe_weights(self.root))
            return _untraceable(weights_only, f"{_OTHER_LOSS}, and compile was given no loss")
        subject, shadow, training, failure = self._traced(batch)
        if shadow is None:
            return _untraceable(subject.tensors, failure)
        # What passed once is looked at again with half the forward passes, until something disagrees.
        settings = replace(self.settings, quick=self.settings.quick or batch.signature in self._passed)
        # Rounding that was far below its limit last time is measured at every second check only.
        rests = batch.signature in self._calm
        question = Question(
            subject=subject, shadow=shadow, training=training, wrt=self.wrt, surrogates=self.surrogates,
            settings=settings, seed=seed, rounding=not rests, locate=locate,
        )  # fmt: skip
        result = Answer(question, subject.values(batch, weights)).result()
        self._passed.add(batch.signature)
        self._calm.discard(batch.signature)
        if calm_rounding(result):
            self._calm.add(batch.signature)
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
        values = training.feed(moving, [*fixed, np.ones((), np.float32)])
        return subject, training.main.point(*values)

    def diagnose(self, batch: Batch, weights: Mapping[int, Any]) -> tuple[Culprit, ...]:
        """What makes a step's values NaN or Inf, found by running its batch again in the training dtype.

        Args:
            batch: the whole batch of the step.
            weights: values from before the step, by ``id`` of the Keras variable; missing ones are as they are now.

        Returns:
            The culprit, with the samples at fault; empty when everything is finite this time, or there is no loss.
        """
        if not has_loss(self.root):
            return ()
        trial = _Trial(model_subject(self.root, batch, training=self.training), batch, weights)
        loss = trial.point(batch).loss
        if not trial.is_bad(batch):
            return ()
        culprits = Blame(trial.subject, trial.program, trial.feed(batch), 0, self.settings, PointProblem).nonfinite(
            loss
        )
        rows = faulty_rows(lambda rows: trial.is_bad(batch.tiled(rows)), batch.count)
        return tuple(_with_rows(culprit, rows) for culprit in culprits)

    def dominant_sample(self, batch: Batch, weights: Mapping[int, Any]) -> tuple[int, float] | None:
        """The row of a batch whose gradient outweighs that of all others, and its share; ``None`` when none does.

        Args:
            batch: the whole batch of the step.
            weights: as for :meth:`diagnose`.
        """
        if not has_loss(self.root):
            return None
        trial = _Trial(model_subject(self.root, batch, training=self.training), batch, weights)
        return dominant_row(lambda rows: trial.norm(batch.tiled(rows)), batch.count)

    def _traced(self, batch: Batch) -> tuple[Subject, Any, Any, str]:
        key = batch.signature
        if key not in self._programs:
            subject = self._subject or model_subject(self.root, batch, training=self.training)
            backend = program_backend()
            moving, fixed = subject.values(batch)
            training = backend.Program(_scaled(subject.loss), moving, [*fixed, np.ones((), np.float32)], None)
            shadow, failure = None, ""

            def in_float64() -> AbstractContextManager[None]:
                return float64_shadow(subject.layers, subject.losses, [*subject.variables, *subject.state])

            try:
                shadow = backend.Program(subject.loss, moving, fixed, "float64", in_float64)
            except Exception as error:  # noqa: BLE001  user code that cannot run in float64 is a verdict, not a crash
                where = backend.location_of(error)
                failure = f"the model cannot run in float64: {gist(error)}" + (f" (at {where})" if where else "")
            self._programs[key] = (subject, shadow, training, failure)
        return self._programs[key]


class _Trial:
    """One step's loss in the training dtype, with its weights, on batches of the same form."""

    def __init__(self, subject: Subject, batch: Batch, weights: Mapping[int, Any]) -> None:
        self.subject = subject
        self._weights = [weights.get(id(variable), variable.value) for variable in subject.variables]
        self.program = program_backend().Program(subject.loss, *subject.values(batch, self._weights), None)

    def feed(self, batch: Batch) -> Any:
        return self.program.feed(*self.subject.values(batch, self._weights))

    def point(self, batch: Batch) -> PointProblem:
        return PointProblem(self.program.main.point(*self.feed(batch)))

    def is_bad(self, batch: Batch) -> bool:
        point = self.point(batch)
        return not np.isfinite(point.loss) or bool(point.nonfinite.any())

    def norm(self, batch: Batch) -> float:
        """Of the gradients of all weights together."""
        norms = self.point(batch).norms[: len(self.subject.variables)]
        return float(np.sqrt(np.sum(np.square(norms))))


def _with_rows(culprit: Culprit, rows: tuple[int, ...]) -> Culprit:
    """The culprit with the samples at fault; what is wrong with data or labels names its rows already."""
    if not rows or culprit.layer in ("data", "labels"):
        return replace(culprit, samples=rows)
    return replace(culprit, samples=rows, detail=f"{culprit.detail}; it comes from {row_words(rows)}")


def _untraceable(tensors: tuple[TensorInfo, ...], failure: str) -> CheckResult:
    checks = tuple(TensorCheck(tensor=t.tensor, verdict="inconclusive", reason=failure) for t in tensors)
    return CheckResult(tensors=tensors, checks=checks, notes=(failure,))


def _scaled(loss: Callable[[list[Any], list[Any]], Any]) -> Callable[[list[Any], list[Any]], Any]:
    """A loss times the last of its fixed values, as a LossScaleOptimizer asks for."""
    import keras

    def scaled(moving: list[Any], fixed: list[Any]) -> Any:
        value = loss(moving, fixed[:-1])
        return value * keras.ops.cast(fixed[-1], value.dtype)

    return scaled


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
