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
class _Course:
    """The usable steps of a window: where they are, and per step the norms over all weights and the loss."""

    window: Window
    where: Int64Array
    gradient: Float64Array
    weight: Float64Array
    update: Float64Array
    losses: Float64Array

    @property
    def ratio(self) -> Float64Array:
        """Update norm / weight norm; 0 where the weights are all zero."""
        return np.asarray(self.update / np.where(self.weight > 0, self.weight, np.inf), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploding:
    """Gradients, updates or a loss that run away, seen in any of six ways.

    1. Updates larger than the weights they move. 2. A gradient norm that leaves its own past behind. 3. A loss that
    grows while the weights move fast. 4. Gradients that grow from the loss towards the input while nothing is learned.
    5. Raw gradients so large that clipping leaves training at a standstill. 6. Values that overflow on the way forward.

    Quiet on: scaled losses and targets with an adaptive optimizer, rare spiky batches, noise around a converged loss.

    Attributes:
        update: update norm / weight norm at which a step replaces the weights; needs ``patience`` such steps and a loss
            that does not fall (ten times as many if it is unknown). Measured: healthy runs reach 4.5 in the first
            step (Adam, learning rate 1), else 0.16.
        blowout: update norm / weight norm that needs no second step, if the gradient norm is as far above the weight's.
        growth: gradient norm / median of its own past, for ``patience`` steps or until values are non-finite. Measured:
            spiky healthy batches 23, a slowly waking deep net 63.
        loss_growth: loss level / starting level, with updates of at least ``moving``. Our choice, as in faultbench.
        moving: update norm / weight norm from which the weights count as moving fast.
        depth_ratio: gradient rms of the first third of the kernels / last kernel; AUTOTRAINER (Zhang et al. 2021): 70.
        backstop: absolute gradient norm for way 5, where an update is also a millionth of what plain SGD would apply.
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
        """At most one finding: the first of the ways that holds."""
        where = np.flatnonzero(usable_steps(window)).astype(np.int64)
        if where.size:
            gradient, weight, update = global_norms(window, where)
            losses = window.losses[where]
            course = _Course(window=window, where=where, gradient=gradient, weight=weight, update=update, losses=losses)
            ways = (self._updates, self._gradient_growth, self._loss_growth, self._depth_growth, self._hidden)
            for way in ways:
                if found := way(course):
                    return [found]
        return self._overflow(window)

    def _updates(self, course: _Course) -> Finding | None:
        ratio, losses = course.ratio, course.losses
        blown = np.flatnonzero((ratio >= self.blowout) & (course.gradient >= self.blowout * course.weight))
        large = np.flatnonzero(ratio >= self.update)
        # A burst may end in dead units and a loss near its start: then it counts how high the loss went.
        burst = float(losses[large].max(initial=-np.inf)) >= self.loss_growth * abs(losses[0])
        needed = self.patience if np.isfinite(losses).any() else 10 * self.patience
        if not blown.size and (large.size < needed or (improvement(losses) > 0 and not burst)):
            return None
        hits = blown if blown.size else large
        worst = float(ratio[hits].max())
        norm = float(course.gradient[hits].max())
        words = f"one update is {worst:.3g} × the size of the weights (gradient norm {norm:.1e})"
        return _finding(course, hits, value=worst, limit=self.update, words=words)

    def _gradient_growth(self, course: _Course) -> Finding | None:
        gradient = course.gradient
        # Cheap test first: the running median is slow.
        if gradient.size < 2 or not gradient.max() >= self.growth * gradient[gradient > 0].min(initial=np.inf):
            return None
        past = np.array([np.median(gradient[:i]) for i in range(1, gradient.size)])
        hits = 1 + np.flatnonzero((past > 0) & (gradient[1:] >= self.growth * past))
        breaks = course.where[-1] < course.window.steps.size - 1 and gradient.size - 1 in hits
        if not hits.size or (hits.size < self.patience and not breaks):
            return None
        worst = float((gradient[hits] / past[hits - 1]).max())
        words = f"the gradient norm is {worst:.3g} × the median of its own past, now {gradient[hits[-1]]:.1e}"
        return _finding(course, hits, value=worst, limit=self.growth, words=words)

    def _loss_growth(self, course: _Course) -> Finding | None:
        losses = course.losses
        if losses.size < 2 * self.patience or np.isnan(losses).any():
            return None
        fifth = max(self.patience, losses.size // 5)
        start, end = loss_level(losses[:fifth]), float(np.median(losses[-fifth:]))
        # Lost at once, the first fifth is high already; but one first loss may be small by luck, so ask for more.
        if starts_the_run(course.window) and end >= 1e2 * self.loss_growth * abs(losses[0]):
            start = min(start, abs(float(losses[0])))
        fast = float(np.median(course.ratio[-fifth:])) >= self.moving
        if not (start > 0 and end >= self.loss_growth * start and fast):
            return None
        hits = np.flatnonzero(losses >= self.loss_growth * start)
        words = f"the loss grew {end / start:.3g} ×, from {start:.3g} to {end:.3g}, and updates keep moving the weights"
        return _finding(course, hits, value=end / start, limit=self.loss_growth, words=words)

    def _depth_growth(self, course: _Course) -> Finding | None:
        indices = kernels(course.window)
        stuck = improvement(course.losses) < 0.25 and starts_the_run(course.window)
        if indices.size < 3 or course.where.size < 10 * self.patience or not stuck:
            return None
        rms = sparse_rms(course.window)[course.where][:, indices]
        last = rms[:, -1]
        lead = rms[:, : indices.size // 3].max(axis=1) / np.maximum(last, np.finfo(np.float64).tiny)
        worst = float(np.median(lead))
        if np.median(last) == 0.0 or worst < self.depth_ratio:
            return None
        words = f"gradient rms grows {worst:.3g} × from the last kernel to the first ones, and the loss does not fall"
        return _finding(course, np.arange(course.where.size), value=worst, limit=self.depth_ratio, words=words)

    def _hidden(self, course: _Course) -> Finding | None:
        norm, size, update = (float(np.median(n)) for n in (course.gradient, course.weight, course.update))
        rate, level = float(np.median(course.window.learning_rates[course.where])), loss_level(course.losses)
        if course.where.size < 2 or norm < self.backstop * max(1.0, size) or not starts_the_run(course.window):
            return None
        # First order: one update lowers the loss by ‖gradient‖·‖update‖ at most.
        standstill = norm * update < 1e-4 * level
        if not (update <= 1e-6 * norm * rate and standstill):
            return None
        words = f"raw gradient norm {norm:.1e}, hidden by clipping: updates are {update / size:.0e} of the weights"
        return _finding(course, np.arange(course.where.size), value=norm, limit=self.backstop, words=words)

    def _overflow(self, window: Window) -> Sequence[Finding]:
        """Layers with a kernel turn finite into non-finite values by overflow only, whatever their activation."""
        lost = np.flatnonzero(window.loss_known & ~np.isfinite(window.losses))
        if not lost.size:
            return ()
        owners = {info.layer: info for info in window.tensors if len(info.shape) >= 2}
        # A culprit with parts is a weight that was broken before.
        named = [c.layer for c in window.culprits[:1] if c.kind == "forward" and c.layer in owners and not c.parts]
        exponential = [layer for layer, info in owners.items() if info.activation == "exponential"]
        if not named and (window.culprits or len(exponential) < 2):
            return ()
        layer, step = named[0] if named else exponential[-1], int(window.steps[lost[0]])
        stacked = f": {len(exponential)} layers with an exponential activation follow each other"
        return [
            Finding(
                finding="exploding",
                layer=layer,
                first_step=step,
                last_step=step,
                severity="error",
                message=f"values overflow on the way through {layer}{stacked if len(exponential) > 1 else ''}",
                advice="an activation that grows linearly at most, smaller initial weights, or scaled inputs",
                tensors=tuple(info.tensor for info in window.tensors if info.layer == layer),
            )
        ]


def _finding(course: _Course, hits: Int64Array, *, value: float, limit: float, words: str) -> Finding:
    """The finding on the first weight, counted from the input, whose gradient is within a tenth of the largest."""
    window, steps = course.window, course.where[hits]
    peaks = np.nan_to_num(window.column("grad_norm")[steps], nan=-1.0).max(axis=0)
    involved = tuple(window.tensors[i] for i in np.flatnonzero(peaks >= 0.1 * peaks.max()))
    largest = window.tensors[int(np.argmax(peaks))]
    rate = float(window.learning_rates[steps[-1]])
    tried = f"a learning rate well below {rate:.1g}" if rate > 0 else "a lower learning rate"
    return Finding(
        finding="exploding",
        layer=involved[0].layer,
        tensor=involved[0].tensor,
        first_step=int(window.steps[steps[0]]),
        last_step=int(window.steps[steps[-1]]),
        severity="error",
        value=value,
        limit=limit,
        message=f"{words}; largest in {largest.tensor}",
        advice=f"{tried}, clipnorm, scaled inputs and targets, or smaller initial weights",
        tensors=tuple(info.tensor for info in involved),
    )
