"""The ledger: merges what the rules say at each call into one account of the run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from keras_gradwatch.records import FINDINGS, Finding

SEVERITIES = ("info", "warning", "error")

#: Findings about the run as a whole: two that overlap in time are one event, whatever layer the later one points at.
RUN_WIDE = ("nonfinite", "exploding", "vanishing")

#: What may be merely the aftermath of what. A consequence is dropped when its cause began no later and marks all its
#: tensors, or is about the run as a whole.
CONSEQUENCES = {
    "zero_gradient": ("mismatch", "nonfinite", "disconnected", "exploding", "dead_units", "saturated"),
    "vanishing": ("mismatch", "nonfinite", "disconnected", "exploding", "dead_units", "saturated"),
    "imprecise": ("dead_units", "saturated"),
    "exploding": ("mismatch",),
    "stalled": tuple(name for name in FINDINGS if name != "stalled"),
}

#: Findings about several layers at once: two that share a weight are one, whichever layer leads.
SHARED = ("dead_units", "saturated")


class Ledger:
    """All findings of a run so far, one entry per (finding, layer, tensor).

    Example:
        >>> ledger = Ledger()
        >>> first = Finding(finding="vanishing", layer="dense", first_step=1, last_step=25, message="fades")
        >>> len(ledger.update([first], step=25)), len(ledger.update([first], step=50)), len(ledger.findings)
        (1, 0, 1)
    """

    def __init__(self) -> None:
        self._entries: list[Finding] = []
        self._closed: list[Finding] = []
        self._active: tuple[Finding, ...] = ()
        self._step = 0

    def update(self, findings: Iterable[Finding], step: int) -> tuple[Finding, ...]:
        """Takes in what the rules found at ``step``.

        Args:
            findings: findings active now, in any order.
            step: the step at which the rules were asked.

        Returns:
            The entries that are new, ordered as :attr:`findings`; empty when nothing is.
        """
        new, active = list[Finding](), list[Finding]()
        # Causes first, so that a consequence reported at the same time finds its cause.
        for finding in sorted(findings, key=lambda f: (len(CONSEQUENCES.get(f.finding, ())), _order(f))):
            place = next((i for i, entry in enumerate(self._entries) if _same(entry, finding)), None)
            if place is not None:
                self._entries[place] = _merged(self._entries[place], finding)
                active.append(self._entries[place])
                self._take_back(self._entries[place])
            elif not self._explained(finding):
                self._take_back(finding)
                self._entries.append(finding)
                new.append(finding)
                active.append(finding)
        self._active, self._step = tuple(sorted(active, key=_order)), step
        return tuple(sorted(new, key=_order))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings so far, by kind in the order of ``FINDINGS``, then by first step; custom kinds come last."""
        return tuple(sorted((*self._closed, *self._entries), key=_order))

    def holds(self, name: str) -> bool:
        """Whether there is an entry of this kind that a new finding could be merged into."""
        return any(entry.finding == name for entry in self._entries)

    def close(self, names: Iterable[str]) -> None:
        """Leave the entries of these kinds as they are: the same trouble, should it come again, is a new finding."""
        settled = [entry for entry in self._entries if entry.finding in names]
        self._closed += settled
        self._entries = [entry for entry in self._entries if entry not in settled]
        self._active = ()

    def amend(self, finding: Finding, words: str, **changes: Any) -> Finding:
        """Add words to the message of an entry, and change its other fields; gives the entry as it is then."""
        amended = replace(finding, message=f"{finding.message}; {words}", **changes)
        self._entries = [amended if entry == finding else entry for entry in self._entries]
        return amended

    @property
    def active(self) -> tuple[Finding, ...]:
        """The entries that the last update confirmed or opened."""
        return self._active

    @property
    def step(self) -> int:
        """The step of the last update, 0 before the first."""
        return self._step

    def _take_back(self, cause: Finding) -> None:
        """Drop what was told before its cause was seen: looks at the activations come less often than steps."""
        self._entries = [entry for entry in self._entries if not self._caused(cause, entry)]

    def _explained(self, finding: Finding) -> bool:
        return any(self._caused(entry, finding) for entry in self._entries)

    def _caused(self, cause: Finding, finding: Finding) -> bool:
        return cause.finding in CONSEQUENCES.get(finding.finding, ()) and _explains(cause, finding)


def _order(finding: Finding) -> tuple[int, int]:
    kind = FINDINGS.index(finding.finding) if finding.finding in FINDINGS else len(FINDINGS)
    return kind, finding.first_step


def _same(entry: Finding, finding: Finding) -> bool:
    if entry.finding != finding.finding:
        return False
    if entry.finding in RUN_WIDE and finding.first_step <= entry.last_step + 1:
        return True
    if entry.finding in SHARED and set(entry.tensors) & set(finding.tensors):
        return True
    return (entry.layer, entry.tensor) == (finding.layer, finding.tensor)


def _explains(cause: Finding, finding: Finding) -> bool:
    if finding.finding == "stalled":
        return True  # it says no more than that nothing else was found
    if cause.first_step > finding.first_step:
        return False
    spoiled = {*cause.tensors, *cause.explains}
    return cause.finding in RUN_WIDE or (bool(finding.tensors) and set(finding.tensors) <= spoiled)


def _merged(entry: Finding, finding: Finding) -> Finding:
    """The worse of the two, over the time and tensors of both."""
    worst = finding if _badness(finding) > _badness(entry) else entry
    return replace(
        worst,
        # The layer and tensor first named stay: alerts have gone out under that name.
        layer=entry.layer,
        tensor=entry.tensor,
        first_step=min(entry.first_step, finding.first_step),
        last_step=max(entry.last_step, finding.last_step),
        tensors=tuple(dict.fromkeys((*entry.tensors, *finding.tensors))),
        explains=tuple(dict.fromkeys((*entry.explains, *finding.explains))),
    )


def _badness(finding: Finding) -> tuple[int, float]:
    distance = abs(finding.value - (0.0 if math.isnan(finding.limit) else finding.limit))
    return SEVERITIES.index(finding.severity), -1.0 if math.isnan(distance) else distance
