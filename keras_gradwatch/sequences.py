"""The rule for gradients that fade over the time steps of a sequence, which no norm of a weight shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keras_gradwatch.records import Finding, TimeGradient, Window
from keras_gradwatch.signals import is_going_nowhere


@dataclass(frozen=True, slots=True, kw_only=True)
class VanishingInTime:
    """Recurrent layers through which the loss does not reach the far end of the sequence, while nothing is learned.

    A small ratio alone is no fault: a task may need the last steps only, and gates let go by design.

    Attributes:
        ratio: gradient norm at the far end / largest over time; the gradient of the loss with respect to what enters
            the layer. Our choice, as in faultbench; measured: a healthy GRU over 10 steps 5e-2, a healthy LSTM over 30
            steps 1e-6 at its start, which learns all the same.
        improved, known: see ``signals.is_going_nowhere``.
        looks: looks in a row.
        steps: training steps between the first and the last of them.
    """

    ratio: float = 1e-4
    improved: float = 0.1
    known: float = 0.1
    looks: int = 3
    steps: int = 10

    def __call__(self, window: Window) -> Sequence[Finding]:
        """One finding, on the layer whose gradient fades most."""
        looks = window.activations[-self.looks :]
        if len(looks) < self.looks or looks[-1].step - looks[0].step < self.steps:
            return ()
        if not is_going_nowhere(window, improved=self.improved, known=self.known):
            return ()
        faded = [
            (max(ratios), latest)
            for latest in looks[-1].sequences
            if (ratios := [_far_ratio(s) for look in looks for s in look.sequences if s.layer == latest.layer])
            and max(ratios) < self.ratio
        ]
        return [self._finding(window, *min(faded, key=lambda pair: pair[0]))] if faded else ()

    def _finding(self, window: Window, ratio: float, sequence: TimeGradient) -> Finding:
        fall = f"10^{-math.log10(ratio):.1f}" if ratio > 0 else "more than the dtype can hold"
        first = window.activations[-self.looks].step
        return Finding(
            finding="vanishing",
            layer=sequence.layer,
            first_step=min(first, int(window.steps[0])) if window.steps.size else first,
            last_step=window.activations[-1].step,
            value=math.log10(ratio) if ratio > 0 else -math.inf,
            limit=math.log10(self.ratio),
            message=(
                f"over the {len(sequence.norms)} time steps of {sequence.layer} ({sequence.layer_class}) the gradient "
                f"falls by {fall}: the loss does not hear the far end of the sequence"
            ),
            advice="LSTM or GRU, an orthogonal recurrent_initializer, shorter sequences, or pooling over time",
            tensors=sequence.weights,
        )


def _far_ratio(sequence: TimeGradient) -> float:
    """Gradient norm at the weaker end of the sequence / largest one, masked steps left out; NaN when all are zero."""
    norms = sequence.norms[sequence.norms > 0] if sequence.masked else sequence.norms
    largest = float(norms.max(initial=0.0))
    return float(min(norms[0], norms[-1])) / largest if largest > 0 and np.isfinite(largest) else float("nan")
