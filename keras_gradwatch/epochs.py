"""What is counted over one epoch: norms, losses and their noise, the worst check."""

from __future__ import annotations

import numpy as np

from keras_gradwatch.records import STATISTICS, StepRecord


class Epochs:
    """The books of a run by epoch: running while one lasts, a number each once it is over.

    Attributes:
        epoch: number of the present epoch, from 0.
        start: its first step, counted from 1 in this run.
        losses: mean loss of each epoch that is over; NaN when unknown.
        noise: standard error of each.
    """

    def __init__(self) -> None:
        self.epoch, self.start = 0, 1
        self.losses, self.noise = list[float](), list[float]()
        self._norms, self._batches, self._error = Mean(), Mean(), float("nan")

    def begin(self, epoch: int, *, start: int) -> None:
        """A new epoch begins with the step ``start``."""
        self.epoch, self.start = epoch, start
        self._norms, self._batches, self._error = Mean(), Mean(), float("nan")

    def add(self, record: StepRecord) -> None:
        """Take in a sampled step."""
        self._norms.add(global_norm(record))
        self._batches.add(float("nan") if record.loss is None else record.loss)
        errors = [c.error for c in record.check.checks] if record.check else []
        self._error = float(np.fmax.reduce([self._error, *filter(np.isfinite, errors)]))

    def end(self) -> None:
        """Close the books of the present epoch."""
        self.losses.append(self._batches.value)
        self.noise.append(self._batches.standard_error)

    def forget(self) -> None:
        """Training goes on from an earlier state: what the epochs before it came to says nothing any more."""
        self.losses, self.noise = [], []

    @property
    def logs(self) -> dict[str, float]:
        """``grad_norm`` and ``grad_check_error`` of the present epoch; NaN where nothing was measured."""
        return {"grad_norm": self._norms.value, "grad_check_error": self._error}


class Mean:
    """Mean of the finite numbers added, and how sure it is; NaN when there is none."""

    def __init__(self) -> None:
        self._sum, self._count, self._mean, self._squares = 0.0, 0, 0.0, 0.0

    def add(self, number: float) -> None:
        """Take in a number; one that is not finite is left out."""
        if np.isfinite(number):
            self._sum, self._count = self._sum + number, self._count + 1
            # Welford (1962): sum of squares about the running mean, safe from cancellation.
            before, self._mean = self._mean, self._mean + (number - self._mean) / self._count
            self._squares += (number - before) * (number - self._mean)

    @property
    def standard_error(self) -> float:
        """Spread of the numbers / square root of their number; NaN for fewer than two."""
        count = self._count
        return float(np.sqrt(self._squares / (count - 1) / count)) if count > 1 else float("nan")

    @property
    def value(self) -> float:
        """The mean."""
        return self._sum / self._count if self._count else float("nan")


def is_nonfinite(record: StepRecord) -> bool:
    """Whether the loss or a gradient of a step holds NaN or Inf."""
    counts = record.statistics[:, STATISTICS.index("nonfinite_count")]
    return bool((record.loss is not None and not np.isfinite(record.loss)) or np.nansum(counts) > 0)


def is_harmful(record: StepRecord) -> bool:
    """Non-finite, and not merely skipped by loss scaling: the loss is lost or a weight has moved."""
    lost = record.loss is not None and not np.isfinite(record.loss)
    moved = record.statistics[:, STATISTICS.index("update_ratio")] != 0.0  # NaN has moved, too
    return is_nonfinite(record) and (lost or bool(moved.any()))


def global_norm(record: StepRecord) -> float:
    """Norm of all gradients of a step together; NaN when none was measured or any is not finite."""
    norms = record.statistics[:, STATISTICS.index("grad_norm")]
    if np.isnan(norms).all() or is_nonfinite(record):
        return float("nan")
    return float(np.sqrt(np.nansum(np.square(norms))))
