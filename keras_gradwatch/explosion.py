"""The rule for gradients, updates or losses that run away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keras_gradwatch.records import Finding, Float64Array, Int64Array, Window
from keras_gradwatch.signals import (
    global_norms,
    improvement,
    kernels,
    loss_level,
    sparse_rms,
    starts_the_run,
    usable_steps,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploding:
    """Gradients, updates or a loss that run away, seen in any of six ways.

    1. Updates larger than the weights they move. 2. The gradient norm leaves its own past behind. 3. The loss grows while
    the weights move fast. 4. Gradients grow from the loss towards the input and nothing is learned. 5. A layer's
    values overflow in the forward pass. 6. Raw gradients so large that clipping leaves training at a standstill.

    Quiet on: scaled losses and targets with an adaptive optimizer, rare spiky batches, noise around a converged loss.

    Attributes:
        update: update norm / weight norm at which a step replaces the weights; needs ``patience`` such steps and a loss
            that does not fall. Measured: healthy runs reach 4.5 in their first step (Adam, learning rate 1), else 0.16.
        blowout: update norm / weight norm that needs no second step, if the gradient norm is as far above the weight norm.
        growth: gradient norm / median of its own past, for ``patience`` steps or until values are non-finite. Measured:
            spiky healthy batches 23, a slowly waking deep net 63.
        loss_growth: loss level / starting level, with updates of at least ``moving``. Our choice, as in faultbench.
        moving: update ratio from which the weights count as moving fast.
        depth_ratio: gradient rms of the first third of the kernels / last kernel. AUTOTRAINER (Zhang et al. 2021) uses 70.
        backstop: absolute gradient norm for way 6, where an update is also a millionth of what plain SGD would apply.
        patience: steps.
    """

    update: float = 1.0
    blowout: float = 1e2
    growth: float = 1e3
    loss_growth: float = 10.0
    moving: float = 1e-2
    depth_ratio: float = 1e2
    backstop: float = 1e6
    patience: int = 3

    def __call__(self, window: Window) -> Sequence[Finding]:
        """At most one finding: the first of the ways that holds, on the layer with the largest gradient."""
        overflow = self._overflow(window)
        where = np.flatnonzero(usable_steps(window))
        if not where.size:
            return overflow
        gradient, weight, update = global_norms(window, where)
        ratio, losses = update / np.where(weight > 0, weight, np.inf), window.losses[where]
        finds = (
            self._updates(window, where, gradient, weight, ratio, losses),
            self._gradient_growth(window, where, gradient),
            self._loss_growth(window, where, ratio, losses),
            self._depth_growth(window, where, losses),
            self._hidden(window, where, gradient, weight, update, losses),
        )
        return next((find for find in finds if find), overflow)

    def _updates(
        self,
        window: Window,
        where: Int64Array,
        gradient: Float64Array,
        weight: Float64Array,
        ratio: Float64Array,
        losses: Float64Array,
    ) -> Sequence[Finding]:
        blown = np.flatnonzero((ratio >= self.blowout) & (gradient >= self.blowout * weight))
        large = np.flatnonzero(ratio >= self.update)
        hits = blown if blown.size else large
        if not blown.size and (large.size < self.patience or improvement(losses) > 0):
            return ()
        worst = float(ratio[hits].max())
        words = f"one update is {_times(worst)} the size of the weights (gradient norm {gradient[hits].max():.1e})"
        return self._finding(window, where[hits], value=worst, limit=self.update, words=words)

    def _gradient_growth(self, window: Window, where: Int64Array, gradient: Float64Array) -> Sequence[Finding]:
        if gradient.size < 2 or gradient.max() < self.growth * gradient[gradient > 0].min(initial=np.inf):
            return ()
        past = np.array([np.median(gradient[:i]) for i in range(1, gradient.size)])
        hits = 1 + np.flatnonzero((past > 0) & (gradient[1:] >= self.growth * past))
        broke = where[-1] < window.steps.size - 1 and hits.size and hits[-1] == gradient.size - 1
        if hits.size < self.patience and not broke:
            return ()
        worst = float((gradient[hits] / past[hits - 1]).max())
        words = f"the gradient norm is {_times(worst)} its own past (now {gradient[hits[-1]]:.1e})"
        return self._finding(window, where[hits], value=worst, limit=self.growth, words=words)

    def _loss_growth(
        self, window: Window, where: Int64Array, ratio: Float64Array, losses: Float64Array
    ) -> Sequence[Finding]:
        fifth = max(self.patience, losses.size // 5)
        start, end = loss_level(losses[:fifth]), loss_level(losses[-fifth:])
        start = min(start, loss_level(losses[:1])) if starts_the_run(window) else start
        fast = float(np.median(ratio[-fifth:])) >= self.moving
        if losses.size < 2 * self.patience or not (start > 0 and end >= self.loss_growth * start and fast):
            return ()
        hits = np.flatnonzero(np.abs(losses) >= self.loss_growth * start)
        words = f"the loss grew {_times(end / start)}, from {start:.3g} to {end:.3g}, while updates keep moving the weights"
        return self._finding(window, where[hits], value=end / start, limit=self.loss_growth, words=words)

    def _depth_growth(self, window: Window, where: Int64Array, losses: Float64Array) -> Sequence[Finding]:
        indices = kernels(window)
        if indices.size < 3 or where.size < 10 * self.patience or not improvement(losses) < 0.25:
            return ()
        rms = sparse_rms(window)[where][:, indices]
        first = rms[:, : indices.size // 3].max(axis=1)
        lead = first / np.maximum(rms[:, -1], np.finfo(np.float64).tiny)
        if not starts_the_run(window) or np.median(lead) < self.depth_ratio or np.median(rms[:, -1]) == 0.0:
            return ()
        worst = float(np.median(lead))
        words = f"gradient rms grows {_times(worst)} from the last kernel to the first ones, and the loss does not fall"
        return self._finding(window, where, value=worst, limit=self.depth_ratio, words=words)

    def _hidden(
        self,
        window: Window,
        where: Int64Array,
        gradient: Float64Array,
        weight: Float64Array,
        update: Float64Array,
        losses: Float64Array,
    ) -> Sequence[Finding]:
        rates, level = window.learning_rates[where], loss_level(losses)
        norm = float(np.median(gradient))
        if norm < self.backstop * max(1.0, float(np.median(weight))) or not level > 0:
            return ()
        shrunk = float(np.median(update)) <= 1e-6 * norm * float(np.median(rates))
        # First order: a step along the gradient lowers the loss by ‖gradient‖·‖update‖ at most.
        standstill = float(np.median(gradient * update)) < 1e-4 * level
        if not (shrunk and standstill and starts_the_run(window) and where.size >= 2):
            return ()
        words = (
            f"raw gradient norm {norm:.1e}; clipping (or the optimizer) shrinks the updates to "
            f"{float(np.median(update / weight)):.0e} of the weights, so that training stands still"
        )
        return self._finding(window, where, value=norm, limit=self.backstop, words=words)

    def _overflow(self, window: Window) -> Sequence[Finding]:
        """Linear layers and unbounded activations turn finite into non-finite values only by overflow."""
        lost = np.flatnonzero(window.loss_known & ~np.isfinite(window.losses))
        if not lost.size:
            return ()
        owners = {info.layer: info for info in window.tensors if len(info.shape) >= 2}
        forward = next((c.layer for c in window.culprits[:1] if c.kind == "forward" and c.layer in owners), "")
        exponential = [layer for layer, info in owners.items() if info.activation == "exponential"]
        if not forward and (len(exponential) < 2 or window.culprits):
            return ()
        layer = forward or exponential[-1]
        return [
            Finding(
                finding="exploding",
                layer=layer,
                first_step=int(window.steps[lost[0]]),
                last_step=int(window.steps[lost[0]]),
                severity="error",
                message=f"the values overflow on the way through {layer}"
                + (f": {len(exponential)} layers with an exponential activation follow each other" if exponential else ""),
                advice="a bounded or linear-growth activation, smaller initial weights, or scaled inputs",
                tensors=tuple(info.tensor for info in window.tensors if info.layer == layer),
            )
        ]

    def _finding(
        self, window: Window, hits: Int64Array, *, value: float, limit: float, words: str
    ) -> Sequence[Finding]:
        peak = window.column("grad_norm")[hits]
        order = np.where(np.isfinite(peak), peak, -1.0).max(axis=0)
        largest = window.tensors[int(np.argmax(order))]
        rate = float(window.learning_rates[hits[-1]])
        tried = f"a learning rate well below {rate:.1g}" if np.isfinite(rate) and rate > 0 else "a lower learning rate"
        return [
            Finding(
                finding="exploding",
                layer=largest.layer,
                tensor=largest.tensor,
                first_step=int(window.steps[hits[0]]),
                last_step=int(window.steps[hits[-1]]),
                severity="error",
                value=value,
                limit=limit,
                message=f"{words}; largest in {largest.tensor}",
                advice=f"{tried}, clipnorm, scaled inputs and targets, or smaller initial weights in {largest.layer}",
                tensors=(largest.tensor,),
            )
        ]


def _times(value: float) -> str:
    return f"{value:.3g} ×"
