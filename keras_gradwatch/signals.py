"""Quantities of a window that several rules read: steps that count, strengths of gradients, how far the loss fell."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from keras_gradwatch.records import Float64Array, Int64Array, TensorInfo, Window

BoolArray = npt.NDArray[np.bool_]


def connected(window: Window) -> BoolArray:
    """Tensors whose gradient exists at every step, shape ``[V]``."""
    return np.asarray(window.connected.all(axis=0), dtype=np.bool_)


def kernels(window: Window) -> Int64Array:
    """Indices of the connected weights with two or more dimensions, in network order.

    Biases and norm scales are left out: their gradients differ from kernels' by nature, and some (a bias before
    BatchNormalization, an attention key's bias) are zero by mathematics.
    """
    is_kernel = np.array([len(info.shape) >= 2 for info in window.tensors], dtype=np.bool_)
    return np.flatnonzero(is_kernel & connected(window)).astype(np.int64)


def usable_steps(window: Window) -> BoolArray:
    """Steps that were tracked and are finite in every connected gradient, every weight and the loss, shape ``[S]``."""
    lit = connected(window)
    finite = np.isfinite(window.column("grad_norm")[:, lit]) & np.isfinite(window.column("weight_norm")[:, lit])
    steps = finite.all(axis=1) & (np.isfinite(window.losses) | ~window.loss_known)
    return np.asarray(steps & lit.any(), dtype=np.bool_)


def starts_the_run(window: Window) -> bool:
    """True when the window reaches back to the first sampled step, so that nothing was learned before it."""
    if window.steps.size == 0:
        return False
    stride = int(np.diff(window.steps).min()) if window.steps.size > 1 else 1
    return int(window.steps[0]) <= max(stride, 1)


def sparse_rms(window: Window) -> Float64Array:
    """Root mean square of the non-zero gradient entries, shape ``[S, V]``.

    An embedding's gradient is zero in every row that the batch does not use; over all entries its rms would look
    vanishing only because the vocabulary is large.
    """
    size = np.array([max(info.size, 1) for info in window.tensors], dtype=np.float64)
    entries = np.maximum((1.0 - window.column("zero_fraction")) * size, 1.0)
    return np.asarray(window.column("grad_norm") / np.sqrt(entries), dtype=np.float64)


def loss_level(losses: Float64Array) -> float:
    """Median of |loss| over the finite entries; NaN when there are none."""
    finite = losses[np.isfinite(losses)]
    return float(np.median(np.abs(finite))) if finite.size else float("nan")


def improvement(losses: Float64Array) -> float:
    """Share of the starting loss that is gone at the end: 0 = flat, 1 = all, negative = it grew; NaN when unknown.

    Medians of the first tenth and the last fifth (at least three steps each), because one batch's loss is noisy.
    """
    finite = losses[np.isfinite(losses)]
    if finite.size < 2:
        return float("nan")
    start = float(np.median(finite[: max(3, finite.size // 10)]))
    end = float(np.median(finite[-max(3, finite.size // 5) :]))
    return (start - end) / abs(start) if start else 0.0


def knowledge(window: Window) -> float:
    """What the predictions know of the targets: 0 = no more than a constant would, 1 = all; NaN when unknown.

    1 − loss / reference, the median over the latest three looks. The reference is the smallest loss that any look saw
    with every prediction given to another sample: about that of the best constant, for any loss and any scale of it.
    How bad the start was does not matter.
    """
    looks = window.activations
    reference = min((look.shuffled_loss for look in looks if look.shuffled_loss > 0), default=float("nan"))
    known = [1.0 - look.loss / reference for look in looks[-3:] if np.isfinite(look.loss)]
    return float(np.median(known)) if known and not math.isnan(reference) else float("nan")


def run_improvement(window: Window) -> float:
    """Share of the loss of the first epoch that was gone in the latest ones; within the window when epochs are few."""
    losses = window.epoch_losses
    if np.isfinite(losses).sum() < 4:
        return improvement(window.losses)
    end = float(np.nanmedian(losses[-3:]))
    start = float(losses[np.isfinite(losses)][0])
    return (start - end) / abs(start) if start else 0.0


def is_settled(window: Window) -> bool:
    """Whether enough of the run is over to say that it goes nowhere: half of the plan, 500 steps, or all of it.

    Our choice: what does not fall may still be warming up or crossing a plateau.
    """
    done = int(window.steps[-1]) if window.steps.size else 0
    return window.ended or done >= min(window.planned_steps / 2 or math.inf, 500)


def is_going_nowhere(window: Window, *, improved: float, known: float) -> bool:
    """Whether, late enough in the run, the model has learned nothing to speak of.

    Args:
        window: the run so far.
        improved: share of the loss that must be gone to be getting somewhere. It does not count for predictions that
            know less than a tenth of the targets: a loss may fall from a bad start to that of a constant.
        known: what the predictions must know of the targets to have learned; see :func:`knowledge`.
    """
    if not is_settled(window):
        return False
    flat, known_now = run_improvement(window) < improved, knowledge(window)
    return flat if math.isnan(known_now) else known_now < min(0.1, known) or (known_now < known and flat)


def has_learned(window: Window, share: float) -> bool:
    """Whether at least this share of the loss is gone: judged by what the predictions know, else by how far it fell."""
    known = knowledge(window)
    return bool((run_improvement(window) if np.isnan(known) else known) >= share)


def global_norms(window: Window, steps: Int64Array) -> tuple[Float64Array, Float64Array, Float64Array]:
    """L2 norms over all connected tensors at the given steps: of the gradient, the weights and the applied update."""
    lit = connected(window)
    gradient = window.column("grad_norm")[steps][:, lit]
    weight = window.column("weight_norm")[steps][:, lit]
    # A zero weight has an infinite ratio and an unknown (small) update: leave it out.
    update = np.where(weight > 0, np.nan_to_num(window.column("update_ratio")[steps][:, lit], posinf=0.0), 0.0) * weight
    return l2_norm(gradient), l2_norm(weight), l2_norm(update)


def l2_norm(values: Float64Array) -> Float64Array:
    """Norm over the last axis, safe from overflow: ``[S, V]`` to ``[S]``."""
    largest = np.abs(values).max(axis=-1, initial=0.0)
    scale = np.where(largest > 0, largest, 1.0)
    return np.asarray(scale * np.sqrt(((values / scale[..., None]) ** 2).sum(axis=-1)), dtype=np.float64)


def layers_of(tensors: tuple[TensorInfo, ...]) -> tuple[str, ...]:
    """The layers that own these tensors, each once, in order."""
    return tuple(dict.fromkeys(info.layer for info in tensors))


def listed(names: tuple[str, ...], *, most: int = 4) -> str:
    """Names for a sentence: ``"a, b, c and 12 more"``."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"
