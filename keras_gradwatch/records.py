"""The facts that travel through the house: what was measured, what was concluded. No framework, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

Role = Literal["weight", "input"]
Severity = Literal["info", "warning", "error"]

#: Verdicts of the gradient check on one tensor, from the most to the least alarming.
VERDICTS = (
    "mismatch",
    "nonfinite",
    "imprecise",
    "inconclusive",
    "disconnected",
    "declared",
    "zero",
    "kink",
    "ok",
)

#: Findings about training, in the order in which a reader should hear of them.
FINDINGS = (
    "mismatch",
    "nonfinite",
    "disconnected",
    "imprecise",
    "zero_gradient",
    "exploding",
    "vanishing",
    "dead_units",
    "saturated",
    "oscillating",
    "stalled",
)

#: What ``stop_on="errors"`` stands for.
ERROR_FINDINGS = ("mismatch", "nonfinite", "disconnected")

#: Columns of ``StepRecord.statistics``, in order.
STATISTICS = (
    "grad_norm",
    "grad_rms",
    "grad_absmax",
    "zero_fraction",
    "nonfinite_count",
    "weight_norm",
    "update_ratio",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One weight or input of the watched model.

    Attributes:
        layer: path of the owning layer inside the model, such as ``"encoder/dense_1"``.
        tensor: ``variable.path``, or the input's name.
        role: ``"weight"`` or ``"input"``.
        depth: position of the layer in network order, 0 = nearest the input.
        shape: shape of the tensor (an input's includes the probe's batch axis).
        layer_class: class name of the owning layer, such as ``"Dense"``.
        activation: name of the layer's activation, empty when it has none.
        initializer: class name of this weight's initialiser, empty when unknown.
    """

    layer: str
    tensor: str
    role: Role
    depth: int
    shape: tuple[int, ...]
    layer_class: str = ""
    activation: str = ""
    initializer: str = ""

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A layer (or the loss, the data, the labels) found to be at fault, and the evidence.

    Attributes:
        layer: layer path, or ``"loss"``, ``"data"``, ``"labels"``, ``"sample_weight"``.
        layer_class: class name, empty for the pseudo-layers.
        kind: ``"backward"`` (wrong or non-finite gradient), ``"forward"`` (non-finite value) or ``"cut"`` (it stops).
        parts: what the layer's gradient is wrong with respect to: ``"input"`` or weight paths.
        factor: analytic / numeric slope along the gradient, NaN when it means nothing.
        error: relative error of the layer's own gradient; NaN when it means nothing.
        bar: its error bar.
        detail: one sentence for the message, empty when the fields say it all.
        samples: rows of the batch that make it so, counted from 0; empty when it is not in a few of them.
    """

    layer: str
    layer_class: str = ""
    kind: Literal["backward", "forward", "cut"] = "backward"
    parts: tuple[str, ...] = ()
    factor: float = float("nan")
    error: float = float("nan")
    bar: float = float("nan")
    detail: str = ""
    samples: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCheck:
    """Result of the gradient check for one tensor. Errors and bars are relative to the gradient's norm.

    Attributes:
        tensor: ``variable.path`` or the input's name, as in :class:`TensorInfo`.
        verdict: one of :data:`VERDICTS`.
        error: ``|analytic − numeric|``, float64.
        bar: error bar of ``error``: the smallest relative error this check could have seen.
        rounding_error: ‖training-dtype gradient − float64 gradient‖ / ‖float64 gradient‖.
        factor: analytic / numeric slope along the gradient, NaN when it means nothing.
        reason: why the verdict is not plainly ``ok``; empty otherwise.
    """

    tensor: str
    verdict: str
    error: float = float("nan")
    bar: float = float("nan")
    rounding_error: float = float("nan")
    factor: float = float("nan")
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A slope of a wrong tensor as its gradient has it, beside the measured one. Units: loss per unit of the tensor.

    Attributes:
        tensor: ``variable.path``, or the name of an input or argument.
        along: which slope: of a ``"random"`` direction (entries of about 1), of the unit ``"gradient"`` direction, of
            ``"projection 2"``, or of an entry such as ``"[3, 5]"``.
        analytic, numeric: by backpropagation, by central differences.
        bar: error bar of their difference.
        delta: difference step, in units of the tensor.
        dtype: in which they were computed.
    """

    tensor: str
    along: str
    analytic: float
    numeric: float
    bar: float
    delta: float
    dtype: str = "float64"

    @property
    def error(self) -> float:
        """|analytic − numeric|."""
        return abs(self.analytic - self.numeric)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One gradient check of a whole model (or layer).

    Attributes:
        tensors: the tensors checked, in network order.
        checks: one per tensor, same order.
        culprits: layers at fault, nearest the loss first; empty when nothing is wrong.
        loss: the loss at the checked point, float64.
        evaluations: number of loss evaluations spent.
        awake: the negative control: an error of 1 % planted in any certified tensor would have been seen.
        notes: remarks about the run as a whole, such as a train_step whose loss is not the compiled loss.
        evidence: single slopes of wrong tensors, where they were asked for.
    """

    tensors: tuple[TensorInfo, ...]
    checks: tuple[TensorCheck, ...]
    culprits: tuple[Culprit, ...] = ()
    loss: float = float("nan")
    evaluations: int = 0
    awake: bool = True
    notes: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = ()

    @property
    def verdict(self) -> str:
        """The most alarming verdict of any tensor; ``"inconclusive"`` when none was checked or the control failed."""
        if not self.checks or not self.awake:
            return "inconclusive"
        return min((check.verdict for check in self.checks), key=VERDICTS.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """What one activation function gave for a number of samples, in the training dtype.

    Attributes:
        layer: path of the layer in which it is applied: the layer itself, an ``Activation`` or a custom layer.
        layer_class: class name of that layer.
        kind: ``"relu"``, ``"sigmoid"``, ``"tanh"``, ``"softsign"``, ``"hard_sigmoid"`` or ``"hard_tanh"``.
        silent: shape ``[units]``, True where a unit was exactly zero for every sample; only a relu can be.
        at_limit: share of all entries within 1 % of a limit of the range (of a relu: exactly zero), 0–1.
        ceiling: shape ``[units]``, largest value that entered the relu; NaN when unknown.
        bias: shape ``[units]``, what the layer before adds to every sample; NaN when it adds none.
        output: the model's output passes no further layer.
        owner: path of the layer whose weights made what enters; empty when there is none.
        own: those weights.
        upstream: every trainable weight on which it depends, ``own`` included.
    """

    layer: str
    layer_class: str = ""
    kind: str
    silent: npt.NDArray[np.bool_]
    at_limit: float
    ceiling: Float64Array
    bias: Float64Array
    output: bool = False
    owner: str = ""
    own: tuple[str, ...] = ()
    upstream: tuple[str, ...] = ()

    @property
    def units(self) -> int:
        """Number of units: the last axis, or the channels."""
        return len(self.silent)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeGradient:
    """The gradient of the loss with respect to what enters a recurrent layer, over time.

    Attributes:
        layer, layer_class: path and class name of the recurrent layer.
        norms: shape ``[time steps]``, norm over samples and features.
        masked: some time steps may be masked, so that a gradient of exactly zero there means nothing.
        weights: the layer's own trainable weights.
    """

    layer: str
    layer_class: str = ""
    norms: Float64Array
    masked: bool = False
    weights: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InputScale:
    """Where the numbers of one float input lie: name, mean, standard deviation and largest absolute value."""

    name: str
    mean: float
    std: float
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationRecord:
    """One look at the activations.

    Attributes:
        step: the step just before or just after which it was taken.
        samples: number of samples looked at.
        activations: in network order.
        sequences: one per recurrent layer.
        inputs: one per float input of the model.
        loss: of these samples; NaN when there is none.
        shuffled_loss: the same with every prediction given to another sample; NaN when it means nothing.
    """

    step: int
    samples: int
    activations: tuple[Activation, ...] = ()
    sequences: tuple[TimeGradient, ...] = ()
    inputs: tuple[InputScale, ...] = ()
    loss: float = float("nan")
    shuffled_loss: float = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One sampled training step.

    Attributes:
        step: optimizer steps done, from 1.
        epoch: from 0.
        loss: this batch's own loss; NaN or Inf if it was; ``None`` if it could not be observed.
        statistics: shape ``[tensors, len(STATISTICS)]``; NaN where a gradient is None or nothing was tracked.
        connected: shape ``[tensors]``; False where the gradient is None.
        learning_rate: of the (first) optimizer at this step; NaN when unknown.
        check: the gradient check made on this step's batch, if any.
        culprits: for a non-finite step, what produced the first non-finite value, if it could be found.
    """

    step: int
    epoch: int
    loss: float | None
    statistics: Float64Array
    connected: npt.NDArray[np.bool_]
    learning_rate: float = float("nan")
    check: CheckResult | None = None
    culprits: tuple[Culprit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The last steps, as rules see them: arrays over (step, tensor), oldest step first.

    Attributes:
        tensors: the weights watched, in network order (inputs are in ``check`` only).
        steps, epochs: shape ``[S]``.
        losses: shape ``[S]``; NaN where ``loss_known`` is False or the loss was NaN.
        loss_known: shape ``[S]``; False where the loss could not be observed.
        learning_rates: shape ``[S]``.
        statistics: shape ``[S, V, len(STATISTICS)]``; read a column with :meth:`column`.
        connected: shape ``[S, V]``; False where the gradient is None.
        check: the check of the newest step that has one *inside this window*, else ``None``.
        check_step: its step, 0 when there is none.
        culprits: those of the first non-finite step in the window.
        activations: the last looks at the activations, oldest first, from further back than the steps.
        epoch_losses: shape ``[E]``, mean loss of each epoch that is over, since the run began; NaN when unknown.
        epoch_noise: shape ``[E]``, its standard error: spread of the batch losses / root of their number.
        planned_steps: steps that the run will take, 0 when unknown.
        ended: no step will follow.
    """

    tensors: tuple[TensorInfo, ...]
    steps: Int64Array
    epochs: Int64Array
    losses: Float64Array
    loss_known: npt.NDArray[np.bool_]
    learning_rates: Float64Array
    statistics: Float64Array
    connected: npt.NDArray[np.bool_]
    check: CheckResult | None = None
    check_step: int = 0
    culprits: tuple[Culprit, ...] = ()
    activations: tuple[ActivationRecord, ...] = ()
    epoch_losses: Float64Array = field(default_factory=lambda: np.zeros(0))
    epoch_noise: Float64Array = field(default_factory=lambda: np.zeros(0))
    planned_steps: int = 0
    ended: bool = False

    def column(self, name: str) -> Float64Array:
        """One statistic over the window, shape ``[S, V]``."""
        return self.statistics[:, :, STATISTICS.index(name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something about the training run that a person should know.

    Attributes:
        finding: one of :data:`FINDINGS`, or the name a custom rule gives.
        layer: path of the layer at fault, or ``"loss"``, ``"data"``, ``"labels"``.
        tensor: path of the weight (or name of the input) it shows in; empty when it is the whole layer.
        first_step, last_step: steps between which it was seen.
        severity: ``"info"``, ``"warning"`` or ``"error"``.
        value, limit: the number that raised it and the threshold it crossed; NaN when there is none.
        message: what, where, how bad, in one or two sentences.
        advice: one concrete thing to try.
        tensors: every tensor it marks in the history's ``findings`` column.
        explains: tensors whose own trouble is a consequence of this one, besides ``tensors``.
        samples: rows of the batch at fault, counted from 0; empty when it is not in a few of them.
    """

    finding: str
    layer: str
    tensor: str = ""
    first_step: int
    last_step: int
    severity: Severity = "warning"
    value: float = float("nan")
    limit: float = float("nan")
    message: str
    advice: str = ""
    tensors: tuple[str, ...] = field(default=())
    explains: tuple[str, ...] = field(default=())
    samples: tuple[int, ...] = field(default=())
