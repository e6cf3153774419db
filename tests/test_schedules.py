import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_gradwatch.schedules import AUTO_SHARE, Schedule, parse_check_schedule, parse_track_schedule

PARSERS = [(parse_check_schedule, "check_freq"), (parse_track_schedule, "track_freq")]


def due_steps(schedule: Schedule, *, steps: int, steps_per_epoch: int) -> list[int]:
    return [step for step in range(1, steps + 1) if schedule.due(step, (step - 1) % steps_per_epoch == 0)]


@pytest.mark.parametrize("parse", [parse_check_schedule, parse_track_schedule])
@pytest.mark.parametrize(
    ("freq", "expected"),
    [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 4, 7]), (100, [1]), (np.int64(3), [1, 4, 7]), (None, [])],
)
def test_number_of_steps(parse, freq, expected: list[int]) -> None:
    """An int N is due at step 1 and every N steps, wherever epochs begin; None is never due."""
    assert due_steps(parse(freq), steps=7, steps_per_epoch=2) == expected


@pytest.mark.parametrize(("freq", "expected"), [("epoch", [1, 5, 9]), ("start", [1])])
def test_words(freq: str, expected: list[int]) -> None:
    """The word epoch is due where an epoch begins, the word start at the first step only."""
    assert due_steps(parse_check_schedule(freq), steps=10, steps_per_epoch=4) == expected


def test_epoch_is_due_at_the_first_step_of_a_run_resumed_within_an_epoch() -> None:
    """The first step of a run is due even if it does not begin an epoch."""
    assert parse_check_schedule("epoch").due(1, False)


@given(freq=st.integers(1, 50) | st.sampled_from(["epoch", "start", "auto"]))
def test_first_step_is_due_under_every_schedule(freq: int | str) -> None:
    """With any frequency but None the first step is checked."""
    assert parse_check_schedule(freq).due(1, True)


def test_auto_waits_until_the_budget_holds_one_more_check() -> None:
    """After a check of 1 s the next one is due once both fit into 2 % of the training time, and not a step before."""
    schedule = parse_check_schedule("auto")
    schedule.record(1.0, 0.0)
    waited = 0
    while not schedule.due(2 + waited, False):
        schedule.record(0.0, 1.0)
        waited += 1
    assert waited == pytest.approx(2.0 / AUTO_SHARE, abs=1)


@given(costs=st.lists(st.floats(0.01, 5.0), min_size=1, max_size=20), step_seconds=st.floats(0.001, 1.0))
def test_auto_never_overspends_while_checks_get_no_dearer(costs: list[float], step_seconds: float) -> None:
    """If no check costs more than the one before, checks after the first never leave the budget."""
    schedule = parse_check_schedule("auto")
    spent, trained = 0.0, 0.0
    remaining = sorted(costs)
    for step in range(1, 2000):
        check_seconds = 0.0
        if remaining and schedule.due(step, False):
            check_seconds = remaining.pop()
            spent += check_seconds
            # Exact up to the rounding of sums of up to 2,000 terms.
            assert step == 1 or spent <= AUTO_SHARE * trained * (1 + 1e-9)
        schedule.record(check_seconds, step_seconds)
        trained += step_seconds


def test_auto_is_not_due_before_any_time_was_recorded() -> None:
    """Without a measurement there is no budget."""
    assert not parse_check_schedule("auto").due(2, True)


def test_auto_starts_anew_for_each_run() -> None:
    """Parsing twice gives two schedules that do not share their budget."""
    first, second = parse_check_schedule("auto"), parse_check_schedule("auto")
    first.record(0.0, 1000.0)
    assert first.due(2, False)
    assert not second.due(2, False)


@pytest.mark.parametrize("freq", [1, "epoch", "start", None])
def test_fixed_schedules_take_note_of_time_and_do_not_change(freq) -> None:
    """A caller may feed any schedule; only the adaptive one listens."""
    schedule = parse_check_schedule(freq)
    before = due_steps(schedule, steps=9, steps_per_epoch=3)
    schedule.record(1.0, 1e9)
    assert due_steps(schedule, steps=9, steps_per_epoch=3) == before


@pytest.mark.parametrize("freq", [1, "epoch", "start", None])
def test_fixed_schedules_are_values(freq) -> None:
    """Two schedules of the same frequency are equal and cannot be changed."""
    assert parse_check_schedule(freq) == parse_check_schedule(freq)
    assert hash(parse_check_schedule(freq)) == hash(parse_check_schedule(freq))


@pytest.mark.parametrize("freq", [0, -1, np.int32(0)])
@pytest.mark.parametrize(("parse", "name"), PARSERS)
def test_number_below_one_is_refused(parse, name: str, freq) -> None:
    """The message says what came, what was expected, and what to do."""
    with pytest.raises(ValueError, match=rf"Received {name}={int(freq)}\. Expected .*at least 1.*\. Use {name}=1 "):
        parse(freq)


@pytest.mark.parametrize("freq", [True, 2.0, [1], b"epoch"])
@pytest.mark.parametrize(("parse", "name"), PARSERS)
def test_wrong_type_is_refused(parse, name: str, freq) -> None:
    """True is not "every step", and 2.0 is not 2."""
    with pytest.raises(TypeError, match=rf"Received {name}=.* of type {type(freq).__name__}\. Expected .*int.*None"):
        parse(freq)


def test_unknown_word_is_refused() -> None:
    """The message lists the words there are."""
    with pytest.raises(ValueError, match=r"Received check_freq='batch'.* one of \"epoch\", \"start\", \"auto\""):
        parse_check_schedule("batch")


def test_tracking_knows_no_words() -> None:
    """Statistics are taken by number of steps only."""
    with pytest.raises(TypeError, match="Received track_freq='epoch' of type str"):
        parse_track_schedule("epoch")
