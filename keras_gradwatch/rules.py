"""What a rule is, and the rules that GradWatch applies by default.

A rule is any callable from a :class:`~keras_gradwatch.records.Window` to findings that are active now. Frozen
dataclasses are customary: thresholds as fields, and no state, because the ledger in ``findings`` does the remembering.

Example:
    >>> from keras_gradwatch.rules import DEFAULT_RULES, Vanishing
    >>> strict = tuple(Vanishing(ratio=1e-1) if isinstance(rule, Vanishing) else rule for rule in DEFAULT_RULES)
    >>> len(strict) == len(DEFAULT_RULES)
    True
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from keras_gradwatch.explosion import Exploding
from keras_gradwatch.faults import Disconnected, Imprecise, Mismatch, NonFinite
from keras_gradwatch.progress import Oscillating, Stalled
from keras_gradwatch.records import Finding, Window
from keras_gradwatch.sequences import VanishingInTime
from keras_gradwatch.trends import Vanishing, ZeroGradient
from keras_gradwatch.units import DeadUnits, Saturated

__all__ = [
    "DEFAULT_RULES",
    "DeadUnits",
    "Disconnected",
    "Exploding",
    "Imprecise",
    "Mismatch",
    "NonFinite",
    "Oscillating",
    "Rule",
    "Saturated",
    "Stalled",
    "Vanishing",
    "VanishingInTime",
    "ZeroGradient",
]


class Rule(Protocol):
    """Looks at the last steps and says what is wrong now."""

    def __call__(self, window: Window) -> Sequence[Finding]:
        """Findings active in this window, with the first and last step in it where they held; empty when healthy."""
        ...


#: What ``rules="default"`` stands for.
DEFAULT_RULES: tuple[Rule, ...] = (
    Mismatch(),
    NonFinite(),
    Disconnected(),
    Imprecise(),
    ZeroGradient(),
    Exploding(),
    Vanishing(),
    DeadUnits(),
    Saturated(),
    VanishingInTime(),
    Oscillating(),
    Stalled(),
)
