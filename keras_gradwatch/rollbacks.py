"""Settings of ``action="rollback"``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """``action=Rollback(...)``: go back to the last healthy state when a finding of ``stop_on`` appears, and go on.

    ``action="rollback"`` stands for ``Rollback()``. Weights, averages, seeds and optimizers return to a copy that was
    made while all was well, the learning rate is cut, and training goes on with the next batch.

    Attributes:
        factor: what the learning rate of every optimizer is multiplied by, in (0, 1]; a finding on the data or labels
            leaves it alone. Our choice: PaLM (Chowdhery et al. 2022, section 5.1) went back and skipped batches
            without a cut; halving is the mildest usual one.
        times: how often; after that training stops, in its last healthy state.
        share: share of the training time that copies may take, besides the one at the start. Our choice: half of what
            tracking may cost.

    Raises:
        ValueError: a field is out of its range.
    """

    factor: float = 0.5
    times: int = 3
    share: float = 0.005

    def __post_init__(self) -> None:
        if not 0 < self.factor <= 1 or self.times < 1 or not 0 < self.share <= 1:
            raise ValueError(
                f"Received {self}. Expected factor and share above 0 and at most 1, and times of at least 1. "
                'Use action="rollback" if in doubt.'
            )
