"""Checks are kept in bounded memory: the first, the latest, and the worst."""

from keras_gradwatch.check_log import KEPT, LATEST, CheckLog
from keras_gradwatch.records import CheckResult, TensorCheck


def check(number: int, *, verdict: str = "ok", error: float = 1e-9) -> CheckResult:
    row = TensorCheck(tensor="kernel", verdict=verdict, error=error, reason="" if verdict == "ok" else f"why {number}")
    return CheckResult(tensors=(), checks=(row,), evaluations=number, notes=(f"note {number % 3}",))


def test_a_thousand_checks_take_the_room_of_a_few() -> None:
    """The first, the latest and the one mismatch in the middle stay; the number, notes and reasons are those of all."""
    log = CheckLog()
    for number in range(1_000):
        log.add(check(number, verdict="mismatch" if number == 400 else "ok", error=1e-9 * (1 + number % 7)))
    kept = [result.evaluations for result in log.results]
    assert len(kept) == KEPT
    assert kept == sorted(kept)
    assert kept[0] == 0
    assert 400 in kept
    assert kept[-LATEST:] == list(range(1_000 - LATEST, 1_000))
    assert log.count == 1_000
    assert list(log.notes) == ["note 0", "note 1", "note 2"]
    assert log.reasons == {"kernel": "why 400"}


def test_a_few_checks_are_all_kept() -> None:
    """Nothing is dropped before there are too many."""
    log = CheckLog()
    for number in range(KEPT):
        log.add(check(number))
    assert [result.evaluations for result in log.results] == list(range(KEPT))
