"""The gradient checks of a run that are worth keeping: the first, the latest, and the worst in between."""

from __future__ import annotations

import math

from keras_gradwatch.records import VERDICTS, CheckResult

#: Checks kept in full, and the latest among them that are never dropped.
KEPT, LATEST = 64, 16


class CheckLog:
    """Checks in bounded memory. A run of a million steps may check ten thousand times.

    Beyond :data:`KEPT` the most harmless check between the first and the latest sixteen is dropped. The notes of all
    checks and the last reason of each tensor stay.

    Attributes:
        count: number of checks made.
        results: those kept, oldest first.
        notes: remarks of all checks, each once.
        reasons: why a tensor was last not plainly right, by tensor.
    """

    def __init__(self) -> None:
        self.count = 0
        self.results: list[CheckResult] = []
        self.notes: dict[str, None] = {}
        self.reasons: dict[str, str] = {}

    def add(self, result: CheckResult) -> None:
        """Take in the check just made."""
        self.count += 1
        self.results.append(result)
        self.notes.update(dict.fromkeys(result.notes))
        self.reasons.update({check.tensor: check.reason for check in result.checks if check.reason})
        if len(self.results) > KEPT:
            del self.results[min(range(1, KEPT + 1 - LATEST), key=lambda place: _alarm(self.results[place]))]


def _alarm(result: CheckResult) -> tuple[int, float]:
    errors = [check.error for check in result.checks if math.isfinite(check.error)]
    return -VERDICTS.index(result.verdict), max(errors, default=0.0)
