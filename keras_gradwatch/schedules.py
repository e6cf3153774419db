"""When to look: which steps of a run are checked or tracked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from numbers import Integral

#: Share of the training time that ``check_freq="auto"`` may spend on checks. Our choice: too little to be noticed.
AUTO_SHARE = 0.02


class Schedule(ABC):
    """Says which steps are due. Steps are counted within one run (one call of ``fit``), from 1.

    Where one call executes several steps (``steps_per_execution``), ask for each of them.
    """

    __slots__ = ()

    @abstractmethod
    def due(self, step: int, first_step_of_epoch: bool) -> bool:
        """Whether to look at this step."""

    # Not abstract: only an adaptive schedule listens, and the callback need not know which one it has.
    def record(self, check_seconds: float, training_seconds: float) -> None:  # noqa: B027
        """Take note of the time spent since the last call; a fixed schedule ignores it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Never(Schedule):
    """No step is due."""

    def due(self, step: int, first_step_of_epoch: bool) -> bool:
        """False."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Schedule):
    """The first step of the run."""

    def due(self, step: int, first_step_of_epoch: bool) -> bool:
        """True at step 1."""
        return step == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryEpoch(Schedule):
    """The first step of the run, and of every epoch."""

    def due(self, step: int, first_step_of_epoch: bool) -> bool:
        """True at step 1 and where an epoch begins."""
        return step == 1 or first_step_of_epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class EverySteps(Schedule):
    """The first step of the run, and every N-th from there: 1, 1 + N, 1 + 2 N and so on.

    Attributes:
        steps: N, at least 1.
    """

    steps: int

    def due(self, step: int, first_step_of_epoch: bool) -> bool:
        """True at steps 1, 1 + N, 1 + 2 N and so on."""
        return (step - 1) % self.steps == 0


@dataclass(slots=True, kw_only=True)
class WithinBudget(Schedule):
    """The first step, then as often as a share of the training time allows.

    A check is due as soon as, with one more check that costs as much as the last one, all checks together would have
    taken less than ``share`` of the training time so far. Unlike its siblings it learns while it runs: make a new one
    for each run.

    Attributes:
        share: what checks may cost, as a part of the training time.
        check_seconds: spent on checks so far.
        training_seconds: spent on training so far, without the checks.
        last_check_seconds: cost of the last check. The first one includes tracing, so the second comes late.
    """

    share: float = AUTO_SHARE
    check_seconds: float = field(default=0.0, init=False)
    training_seconds: float = field(default=0.0, init=False)
    last_check_seconds: float = field(default=0.0, init=False)

    def due(self, step: int, first_step_of_epoch: bool) -> bool:
        """True at step 1, and where one more check fits into the budget."""
        if step == 1:
            return True
        return self.check_seconds + self.last_check_seconds < self.share * self.training_seconds

    def record(self, check_seconds: float, training_seconds: float) -> None:
        """Add the time spent since the last call.

        Args:
            check_seconds: on checks; 0 when there was none.
            training_seconds: on training, without the checks.
        """
        self.check_seconds += check_seconds
        self.training_seconds += training_seconds
        if check_seconds > 0:
            self.last_check_seconds = check_seconds


def parse_check_schedule(check_freq: int | str | None) -> Schedule:
    """The schedule that a ``check_freq`` argument stands for. A new object each time: call it once per run.

    Args:
        check_freq: N ≥ 1 for step 1 and every N steps; ``"epoch"`` for the first step of the run and of every epoch;
            ``"start"`` for the first step only; ``"auto"`` for as often as 2 % of the training time allows;
            ``None`` for never.

    Returns:
        The schedule.

    Raises:
        TypeError: if it is neither an int, a string nor ``None``.
        ValueError: if it is an int below 1 or an unknown word.

    Example:
        >>> schedule = parse_check_schedule(100)
        >>> [step for step in range(1, 302) if schedule.due(step, False)]
        [1, 101, 201, 301]
    """
    if check_freq is None:
        return Never()
    if isinstance(check_freq, str):
        return _parse_word(check_freq)
    expected = f"an int of at least 1, {_WORD_LIST}, or None"
    return EverySteps(steps=_parse_steps("check_freq", check_freq, expected=expected))


def parse_track_schedule(track_freq: int | None) -> Schedule:
    """The schedule that a ``track_freq`` argument stands for.

    Args:
        track_freq: N ≥ 1 for step 1 and every N steps; ``None`` for never.

    Returns:
        The schedule.

    Raises:
        TypeError: if it is neither an int nor ``None``.
        ValueError: if it is below 1.

    Example:
        >>> parse_track_schedule(None).due(1, True)
        False
    """
    if track_freq is None:
        return Never()
    return EverySteps(steps=_parse_steps("track_freq", track_freq, expected="an int of at least 1, or None"))


_WORDS: dict[str, type[Schedule]] = {"epoch": EveryEpoch, "start": Start, "auto": WithinBudget}
_WORD_LIST = ", ".join(f'"{word}"' for word in _WORDS)


def _parse_word(word: str) -> Schedule:
    if word not in _WORDS:
        raise ValueError(
            f"Received check_freq={word!r}. Expected one of {_WORD_LIST}, an int of at least 1, or None. "
            "Choose one of the words, or give a number of steps as an int."
        )
    return _WORDS[word]()


def _parse_steps(name: str, value: object, *, expected: str) -> int:
    # bool is an int to Python, but track_freq=True was meant as "on", not as "every 1 step".
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"Received {name}={value!r} of type {type(value).__name__}. Expected {expected}. "
            f"Give {name} a whole number of steps, or None to switch it off."
        )
    steps = int(value)
    if steps < 1:
        raise ValueError(
            f"Received {name}={steps}. Expected {expected}. "
            f"Use {name}=1 for every step, or {name}=None to switch it off."
        )
    return steps
