"""Rules for the course of the loss: it swings from epoch to epoch, or it stands still."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keras_gradwatch.records import Finding, Float64Array, Window
from keras_gradwatch.signals import (
    is_going_nowhere,
    kernels,
    run_improvement,
    starts_the_run,
    usable_steps,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Oscillating:
    """A loss that goes up and down from epoch to epoch by much more than the noise of its batches.

    Quiet on: noisy batches whose epochs agree, small losses near convergence, a single bump (a restarted schedule).

    Attributes:
        epochs: epochs needed after the first, and the most that are looked at is ``span``.
        span: see ``epochs``.
        turns: share of the epochs at which the direction changes. Our choice, as in faultbench.
        least: number of such turns.
        swing: how far the loss goes back after it went forth, on average, / median loss. Measured: swinging models 0.17
            and more, healthy ones with as many turns 0.03.
        floor: share of the first epoch's loss below which the loss counts as this share: near zero swings mean nothing.
        noise: the same / standard error of an epoch's mean.
    """

    epochs: int = 5
    span: int = 30
    turns: float = 0.5
    least: int = 3
    swing: float = 0.1
    floor: float = 0.05
    noise: float = 2.0

    def __call__(self, window: Window) -> Sequence[Finding]:
        """One finding, on the loss."""
        losses = window.epoch_losses[1:][-self.span :]
        if losses.size < self.epochs or not np.isfinite(window.epoch_losses).all():
            return ()
        changes = np.diff(losses)
        turning = changes[1:] * changes[:-1] < 0
        turns = float(turning.mean())
        level = max(float(np.median(np.abs(losses))), self.floor * abs(float(window.epoch_losses[0])))
        # What goes up and comes down again: the smaller of two moves, so that a fall does not count.
        back_and_forth = np.minimum(np.abs(changes[1:]), np.abs(changes[:-1]))[turning]
        change = float(back_and_forth.mean()) if turning.sum() >= self.least else 0.0
        noise = float(np.nanmedian(np.nan_to_num(window.epoch_noise[1:][-self.span :])))
        if turns < self.turns or change < self.swing * level or change < self.noise * noise:
            return ()
        return [self._finding(window, losses, change / level)]

    def _finding(self, window: Window, losses: Float64Array, swing: float) -> Finding:
        rate = float(window.learning_rates[-1]) if window.learning_rates.size else float("nan")
        rate_words = (
            f"a learning rate of {rate / 3:.1g} or less (now {rate:.1g})" if rate > 0 else "a lower learning rate"
        )
        return Finding(
            finding="oscillating",
            layer="loss",
            first_step=_first_step(window),
            last_step=_last_step(window),
            value=swing,
            limit=self.swing,
            message=(
                f"the loss swings by {swing:.0%} of its level from epoch to epoch, between {losses.min():.3g} and "
                f"{losses.max():.3g} in the last {losses.size} epochs, far above the noise of the batches"
            ),
            advice=f"{rate_words}, less momentum, scaled inputs, or a schedule that lowers the rate",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """A loss that has not moved since the run began, with nothing else to blame for it.

    Quiet on: models that already know the targets (converged, or fine-tuned from a good start), plateaus that are left
    before half of the run is over, learning rates that are warming up.

    Attributes:
        improved: share of the starting loss that must be gone to have moved. Our choice, as in faultbench.
        grown: rise of the loss, relative to its start, from which it is another fault than standing still.
        known: what the predictions must know of the targets; see ``signals.knowledge``.
        travel: update ratio × planned steps below which the whole run cannot matter: the learning rate is too small.
        patience: tracked steps.
    """

    improved: float = 0.05
    grown: float = 0.2
    known: float = 0.1
    travel: float = 1e-2
    patience: int = 30

    def __call__(self, window: Window) -> Sequence[Finding]:
        """One finding, on the loss."""
        steps = usable_steps(window)
        if steps.sum() < self.patience or not np.isfinite(window.losses[steps]).any() or _warming_up(window):
            return ()
        gain = run_improvement(window)
        # A model of many epochs and few steps is judged by its epochs, a short one by its steps from the first on.
        whole = starts_the_run(window) or np.isfinite(window.epoch_losses).sum() >= 4
        if not whole or not -self.grown < gain < self.improved:
            return ()
        if not is_going_nowhere(window, improved=self.improved, known=self.known):
            return ()
        return [self._finding(window, gain, _typical_update(window))]

    def _finding(self, window: Window, gain: float, update: float) -> Finding:
        rate = float(window.learning_rates[-1])
        tiny = update * max(window.planned_steps, _last_step(window)) < self.travel
        if tiny:
            why = f"the learning rate ({rate:.1g}) is too small, updates move the weights by {update:.0e} of their size"
            # An update ratio near 1e-3 is a common aim; no more than a thousand times the present rate at once.
            better = rate * min(1e-3 / max(update, 1e-12), 1e3)
            advice = f"a learning rate near {float(f'{better:.1g}'):g}"
        else:
            why = f"updates move the weights by {update:.0e} of their size per step, but it does not help"
            advice = (
                "another learning rate (10 × up or down) or Adam, a wider layer, a loss with slope everywhere, "
                "or check that inputs and targets belong together"
            )
        return Finding(
            finding="stalled",
            layer="loss",
            first_step=_first_step(window),
            last_step=_last_step(window),
            value=gain,
            limit=self.improved,
            message=f"the loss has not moved since the start ({max(gain, 0.0):.1%} gone): {why}",
            advice=advice,
        )


def _typical_update(window: Window) -> float:
    """Median over the steps of the largest update ratio of any kernel."""
    indices = kernels(window)
    if not indices.size:
        return 0.0
    return float(np.nanmedian(window.column("update_ratio")[usable_steps(window)][:, indices].max(axis=1)))


def _warming_up(window: Window) -> bool:
    """Whether the learning rate still rises."""
    rates = window.learning_rates[np.isfinite(window.learning_rates)]
    return rates.size > 1 and rates[-1] > rates[-2]


def _first_step(window: Window) -> int:
    return int(window.steps[0]) if window.steps.size else 1


def _last_step(window: Window) -> int:
    return int(window.steps[-1]) if window.steps.size else 1
