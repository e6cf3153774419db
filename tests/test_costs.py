"""Watching that takes too much of the training time is told once, with the setting to change."""

import time

import pytest

from keras_gradwatch import costs
from keras_gradwatch.costs import Costs


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    assert costs.time is time
    return clock


def spend(watching: Costs, clock: Clock, seconds: float, part: str = "checks") -> None:
    with watching.timed(part):
        clock.now += seconds


def test_seconds_and_shares(clock: Clock) -> None:
    """A quarter of the time that training itself takes; a part inside another counts once."""
    watching = Costs()
    watching.begin()
    with watching.timed("capture"):
        clock.now += 1
        spend(watching, clock, 2, "sinks")
    clock.now += 12
    account = watching.account()
    assert (account["capture_seconds"], account["sinks_seconds"], account["training_seconds"]) == (1, 2, 12)
    assert account["share"] == pytest.approx(0.25)


def test_an_expensive_part_is_told_once_with_its_setting(clock: Clock) -> None:
    """Checks of a fifth of the training time: the words name the share, the limit and check_freq."""
    watching = Costs()
    watching.begin()
    for _ in range(51):
        spend(watching, clock, 0.2)
        clock.now += 1
    words = watching.complaint()
    assert "Watching takes 20% of the training time, more than 10%, most of it for checks" in words
    assert 'Change check_freq="auto"' in words
    assert watching.complaint() == ""


def test_a_cheap_watcher_says_nothing(clock: Clock) -> None:
    """Two percent are fine, and so is the time that tracing takes once."""
    watching = Costs()
    watching.begin()
    spend(watching, clock, 30)
    for _ in range(40):
        spend(watching, clock, 0.02)
        clock.now += 1
    assert watching.complaint() == ""


def test_the_first_seconds_say_nothing(clock: Clock) -> None:
    """A share means nothing while training has only begun."""
    watching = Costs()
    watching.begin()
    spend(watching, clock, 1)
    spend(watching, clock, 1)
    clock.now += 20
    assert watching.complaint() == ""
