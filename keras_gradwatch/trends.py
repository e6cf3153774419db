"""Rules for how training goes: gradients that are right but blocked, fading or running away.

Every rule compares within the run — across depth, with the tensor's own past, with the update that was applied — and
uses an absolute limit only as a backstop, because the loss scale is the user's choice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keras_gradwatch.records import Finding, Float64Array, Int64Array, TensorInfo, Window
from keras_gradwatch.signals import (
    BoolArray,
    connected,
    global_norms,
    improvement,
    kernels,
    layers_of,
    listed,
    loss_level,
    sparse_rms,
    starts_the_run,
    usable_steps,
)

SQUASHING = ("sigmoid", "tanh", "softsign", "hard_sigmoid", "hard_tanh", "softmax")
FIXED_SCALE = ("RandomNormal", "RandomUniform", "TruncatedNormal")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroGradient:
    """Layers whose whole kernel gets an exactly zero gradient, step after step, while the loss asks for change.

    Quiet on: biases that are zero by mathematics, embeddings (zero rows only), steps in which nothing gets a gradient
    because the loss is exactly zero (converged hinge losses, all-zero sample weights), single odd steps.

    Attributes:
        patience: steps in a row. Our choice: one-sample batches leave a live ReLU layer without gradient at times.
        patience_checked: steps in a row when the gradient check agrees that the slope is zero.
        noise: gradient norm × weight norm / |loss| below which the whole model gets nothing. Float32 resolves the loss
            to 6e-8 of itself, so moving every weight by its own size would not be seen.
        converged: share of the window's largest loss below which a model whose gradients have all become zero is done.
    """

    patience: int = 20
    patience_checked: int = 3
    noise: float = 1e-7
    converged: float = 1e-3

    def __call__(self, window: Window) -> Sequence[Finding]:
        """One finding per run of neighbouring blocked layers, on the layer that seems to block."""
        steps = np.flatnonzero(usable_steps(window))
        if not steps.size or not kernels(window).size:
            return ()
        norms, weights, _ = global_norms(window, steps)
        # The loss moves by less than its own rounding when every weight moves by its own size.
        unheard = norms * np.maximum(weights, 1.0) < self.noise * np.abs(window.losses[steps])
        alive = steps[(norms > 0) & ~unheard]
        if self._nothing_learns(window, steps, alive):
            return [self._whole_model(window, steps[steps > alive.max(initial=-1)])]
        if not alive.size:
            return ()
        streak = self._streaks(window, alive)
        blocked = self._blocked(window, streak, total=alive.size)
        blocks = _neighbours(window, blocked)
        return [self._finding(window, block, alive, int(streak[block].min())) for block in blocks]

    def _nothing_learns(self, window: Window, steps: Int64Array, alive: Int64Array) -> bool:
        """Whether no weight gets a gradient any more although there is a loss to reduce.

        From the first step on that is a fault unless the loss is zero. Later it may be success: a hinge loss is then
        zero, and a cross-entropy stands at the constant of Keras' clipping at 1e-7, the same for every batch.
        """
        patience = self.patience_checked if self._checked_zero(window).all() else self.patience
        silent = steps[steps > alive.max(initial=-1)]
        if silent.size < patience or not (alive.size or starts_the_run(window)):
            return False
        losses = window.losses[silent]
        if not alive.size:
            return bool(np.isnan(losses).all() or (losses != 0).any())
        norms, _, _ = global_norms(window, silent)
        top, level = float(np.abs(window.losses[steps]).max()), loss_level(losses)
        return bool((norms == 0).all() and level > self.converged * top and np.ptp(losses) > 1e-6 * level)

    def _streaks(self, window: Window, counted: Int64Array) -> Int64Array:
        """Length of the run of zero gradients that ends at the newest counted step, per tensor, shape ``[V]``."""
        zero = window.column("grad_norm")[counted] == 0.0
        zero |= self._checked_zero(window) & self._noise_only(window, counted)
        return np.where(zero.all(axis=0), len(counted), np.argmin(zero[::-1], axis=0)).astype(np.int64)

    def _checked_zero(self, window: Window) -> BoolArray:
        verdicts = {row.tensor: row.verdict for row in window.check.checks} if window.check else {}
        return np.array([verdicts.get(info.tensor) == "zero" for info in window.tensors], dtype=np.bool_)

    def _noise_only(self, window: Window, counted: Int64Array) -> BoolArray:
        """Where a tensor's gradient is within float32 rounding of the largest one."""
        rms = np.nan_to_num(window.column("grad_rms")[counted])
        return np.asarray(rms < self.noise * rms.max(axis=1, keepdims=True), dtype=np.bool_)

    def _blocked(self, window: Window, streak: Int64Array, *, total: int) -> BoolArray:
        # A streak must also fill half of what the window saw: a long window has long odd stretches.
        needed = np.where(self._checked_zero(window), self.patience_checked, self.patience)
        return (streak >= np.maximum(needed, total / 2)) & connected(window)

    def _whole_model(self, window: Window, silent: Int64Array) -> Finding:
        last, level = window.tensors[-1], loss_level(window.losses[silent])
        loss_words = f", although the loss is {level:.3g}" if np.isfinite(level) else ""
        output_words = f"; the last layer, {last.layer}, ends in {last.activation}" if last.activation else ""
        return Finding(
            finding="zero_gradient",
            layer=last.layer,
            first_step=int(window.steps[silent[0]]),
            last_step=int(window.steps[silent[-1]]),
            severity="error",
            value=0.0,
            limit=self.noise,
            message=f"no weight gets a gradient{loss_words}: nothing can be learned{output_words}",
            advice=(
                "check the output activation against the loss (softmax over one unit is constant, a relu may be dead), "
                "and that the loss depends on the predictions; float16 gradients may underflow"
            ),
            tensors=tuple(info.tensor for info in window.tensors),
        )

    def _finding(self, window: Window, block: Int64Array, counted: Int64Array, streak: int) -> Finding:
        tensors = [window.tensors[i] for i in block]
        layer, why = self._blame(window, block)
        names = tuple(info.tensor for info in tensors)
        return Finding(
            finding="zero_gradient",
            layer=layer,
            tensor=names[0] if len(names) == 1 else "",
            first_step=int(window.steps[counted[-streak]]),
            last_step=int(window.steps[counted[-1]]),
            value=0.0,
            message=f"{listed(names)} got an exactly zero gradient in the last {streak} steps: {why}",
            advice=_block_advice([info.activation for info in tensors]),
            tensors=names,
        )

    def _blame(self, window: Window, block: Int64Array) -> tuple[str, str]:
        """The layer that blocks: the last one hit, or the one before it when only its input is missing."""
        last = window.tensors[block[-1]]
        same = [i for i, info in enumerate(window.tensors) if info.layer == last.layer]
        half_alive = any(i not in block for i in same)
        if not half_alive:
            return last.layer, f"the signal from the loss stops at or just after {last.layer}"
        # A kernel without gradient next to a bias with one: what enters the layer is zero for every sample.
        before = [info.layer for info in window.tensors[: same[0]]]
        if before and any(len(window.tensors[i].shape) >= 2 for i in same if i in block):
            return before[-1], f"everything that {before[-1]} sends to {last.layer} is zero"
        return last.layer, f"what enters {last.layer} is zero for every sample"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vanishing:
    """Gradients that fade from the loss towards the input until the first layers cannot learn.

    A small ratio alone is no fault: Adam rescales it away. It is reported when, besides, the first layers cannot move
    the loss (elasticity), or are hardly moved by the optimizer while later ones are, or the loss is flat.

    Elasticity: gradient norm × weight norm / |loss|, the relative change of the loss, to first order, when the tensor
    changes by its own size. It is free of the loss's and the weights' scale.

    Attributes:
        ratio: gradient rms in the first third of the kernels / largest in the last third. AUTOTRAINER uses 1e-3 between
            first and last kernel (Zhang et al. 2021, ``utils/monitor.py``); with the conditions below 1e-2 is safe.
        elasticity: below it the first layers cannot matter. Measured on small models: healthy first kernels 0.06…50,
            one that trains although its gradient is scaled by 1e-4 on purpose 1e-3, vanishing ones at most 4e-6.
        update: update ratio below which a layer does not move, if it also moves 100 times less than the last third.
            TheDeepChecker and AWS put healthy ratios above 1e-4 and 1e-8.
        flat: improvement of the loss below which it is flat. Our choice; measured 0.11 at most on vanishing models.
        learns: improvement of the loss that clears a model with small elasticity but healthy updates.
        patience: usable steps needed; ten times that for a flat loss.
        share: share of the steps in which the ratio must hold.
    """

    ratio: float = 1e-2
    elasticity: float = 1e-4
    update: float = 1e-5
    flat: float = 0.1
    learns: float = 0.5
    patience: int = 10
    share: float = 0.8

    def __call__(self, window: Window) -> Sequence[Finding]:
        """One finding, on the first faded layer, listing the faded kernels."""
        steps, indices = usable_steps(window), kernels(window)
        if steps.sum() < self.patience or indices.size < 2:
            return ()
        rms = sparse_rms(window)[steps][:, indices]
        if (np.median(rms, axis=0) == 0.0).any():
            return ()  # exactly zero is ZeroGradient's case
        profile = np.log10(np.maximum(rms, np.finfo(np.float64).tiny))
        third = max(1, indices.size // 3)
        profile -= profile[:, -third:].max(axis=1, keepdims=True)
        drop = np.median(profile[:, :third], axis=1)
        if np.mean(drop <= math.log10(self.ratio)) < self.share:
            return ()
        if not self._harmful(window, steps, indices, third):
            return ()
        return [self._finding(window, steps, indices, profile, float(np.median(drop)))]

    def _harmful(self, window: Window, steps: BoolArray, indices: Int64Array, third: int) -> bool:
        level, gain = loss_level(window.losses[steps]), improvement(window.losses[steps])
        first = indices[:third]
        strength = window.column("grad_norm")[:, first] * window.column("weight_norm")[:, first]
        elasticity = float(np.median(strength[steps].max(axis=1))) / level if level > 0 else float("nan")
        updates = np.median(window.column("update_ratio")[steps][:, indices], axis=0)
        still = bool(updates[:third].max() < min(self.update, 1e-2 * updates[-third:].max()))
        if math.isnan(elasticity):
            return still
        powerless = elasticity < self.elasticity and (still or not gain >= self.learns)
        stuck = gain < self.flat and starts_the_run(window) and int(steps.sum()) >= 10 * self.patience
        return powerless or (elasticity < 1e2 * self.elasticity and (stuck or still))

    def _finding(
        self, window: Window, steps: BoolArray, indices: Int64Array, profile: Float64Array, drop: float
    ) -> Finding:
        typical = np.median(profile, axis=0)
        drop = min(drop, float(typical[0]))
        tensors = tuple(window.tensors[i] for i in indices[typical <= max(math.log10(self.ratio), typical[0])])
        first, strongest = tensors[0], window.tensors[indices[int(np.argmax(typical))]]
        update = float(np.median(window.column("update_ratio")[steps][:, window.tensors.index(first)]))
        where = np.flatnonzero(steps)
        origin = ", ".join(filter(None, (first.activation, _snake_case(first.initializer))))
        return Finding(
            finding="vanishing",
            layer=first.layer,
            tensor=first.tensor,
            first_step=int(window.steps[where[0]]),
            last_step=int(window.steps[where[-1]]),
            value=drop,
            limit=math.log10(self.ratio),
            message=(
                f"gradient rms falls by 10^{-drop:.1f} from {strongest.layer} to {first.layer}; "
                f"updates move {first.tensor} by {update:.0e} of its size per step" + (f" ({origin})" if origin else "")
            ),
            advice=_vanishing_advice(tensors),
            tensors=tuple(info.tensor for info in tensors),
        )


def _neighbours(window: Window, blocked: BoolArray) -> list[Int64Array]:
    """Blocked layers that follow each other, as index arrays of their zero tensors.

    A layer with kernels belongs if all its kernels are zero; one without (a norm) joins the block before it if any of
    its weights is zero. Blocks need a kernel: a lone zero bias is often zero by mathematics.
    """
    lit, blocks, current = connected(window), list[Int64Array](), list[int]()
    for layer in layers_of(window.tensors):
        mine = [i for i, info in enumerate(window.tensors) if info.layer == layer and lit[i]]
        cores = [i for i in mine if len(window.tensors[i].shape) >= 2]
        hit = bool(blocked[cores].all()) if cores else bool(current) and bool(blocked[mine].any())
        if hit:
            current += [i for i in mine if blocked[i]]
        elif mine:
            blocks, current = blocks + ([np.array(current)] if current else []), []
    return blocks + ([np.array(current)] if current else [])


def _block_advice(activations: list[str]) -> str:
    if any(activation in ("relu", "relu6") for activation in activations):
        return "the relu units are probably dead: lower the learning rate, start biases at 0, or use leaky_relu or gelu"
    return (
        "look there for stop_gradient, round, argmax, a softmax over one unit or a normalisation over one sample; "
        "if it is meant, set trainable = False on the layers before"
    )


def _vanishing_advice(tensors: tuple[TensorInfo, ...]) -> str:
    if any(info.activation in SQUASHING for info in tensors):
        return "relu or gelu with he_normal, or normalisation between the layers"
    if any(info.initializer in FIXED_SCALE for info in tensors):
        return "an initialiser that follows the layer's width, such as he_normal or glorot_uniform"
    return "normalisation between the layers, skip connections, or larger initial weights"


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
