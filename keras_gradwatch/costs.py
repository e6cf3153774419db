"""What watching costs: seconds by part, their share of the training time, and when to speak of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

#: What is timed, and the setting to change when it takes too long.
PARTS = {
    "capture": "track_freq=10 (fewer steps are measured)",
    "checks": 'check_freq="auto" (as often as 2 % of the training time allows) or "start"',
    "activations": "longer epochs or a larger check_freq: activations are looked at at each check and end of an epoch",
    "sinks": "fewer sinks, or sinks that do less with each row",
}

#: Share of the training time from which on the watcher says that it is too expensive. Our choice: ten times what
#: tracking costs a small model, and enough to be worth a change.
SHARE = 0.1

#: Seconds of training before a share means anything, and before anybody cares. Our choice.
SETTLED_SECONDS = 30.0


class Costs:
    """A clock for each part of the watcher, started with the run.

    Example:
        >>> costs = Costs()
        >>> with costs.timed("checks"):
        ...     pass
        >>> sorted(costs.account())[:2]
        ['activations_seconds', 'activations_share']
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._once = dict.fromkeys(PARTS, 0.0)
        self._began = time.perf_counter()
        self._ended, self._told = 0.0, False

    def begin(self) -> None:
        """Training begins now."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """Training is over."""
        self._ended = self._ended or time.perf_counter()

    @contextmanager
    def timed(self, part: str, *, once: bool = False) -> Iterator[None]:
        """Add to the seconds of a part; a part inside another counts once. What comes ``once`` is no running cost."""
        start, others = time.perf_counter(), sum(self.seconds.values())
        try:
            yield
        finally:
            spent = time.perf_counter() - start - (sum(self.seconds.values()) - others)
            self.seconds[part] += spent
            # The first time includes tracing, whatever comes later.
            self._once[part] = self._once[part] + spent if once else self._once[part] or spent

    @property
    def training_seconds(self) -> float:
        """Seconds since the run began that were not spent on watching."""
        now = self._ended or time.perf_counter()
        return max(now - self._began - sum(self.seconds.values()), 1e-9)

    def account(self) -> dict[str, float]:
        """Seconds and shares of the training time."""
        total, training = sum(self.seconds.values()), self.training_seconds
        cost = {f"{name}_seconds": seconds for name, seconds in self.seconds.items()}
        cost |= {f"{name}_share": seconds / training for name, seconds in self.seconds.items()}
        return cost | {"training_seconds": training, "share": total / training}

    def complaint(self) -> str:
        """What to say when watching has become too expensive, once; empty otherwise."""
        cost = self.account()
        if self._told or cost["training_seconds"] < SETTLED_SECONDS:
            return ""
        running = {part: self.seconds[part] - self._once[part] for part in PARTS}
        share = sum(running.values()) / cost["training_seconds"]
        if share <= SHARE:
            return ""
        self._told = True
        return _complaint(running, share)


def _complaint(running: Mapping[str, float], share: float) -> str:
    largest = max(running, key=lambda part: running[part])
    return (
        f"Watching takes {share:.0%} of the training time, more than {SHARE:.0%}, most of it for {largest}. "
        f"Change {PARTS[largest]}"
    )
