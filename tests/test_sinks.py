import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from keras_gradwatch.records import STATISTICS, Finding, StepRecord, TensorInfo
from keras_gradwatch.sinks import SinkSet

TENSORS = (TensorInfo(layer="dense", tensor="dense/kernel", role="weight", depth=0, shape=(2, 3)),)
FINDING = Finding(finding="vanishing", layer="dense", first_step=1, last_step=9, message="falls by 10^6")
RECORD = StepRecord(
    step=1, epoch=0, loss=0.5, statistics=np.zeros((1, len(STATISTICS))), connected=np.ones(1, dtype=np.bool_)
)


class Recorder:
    """A sink with every method; it notes its calls, and raises in those it is told to."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.calls: list[str] = []

    def open(self, tensors: tuple[TensorInfo, ...], attributes: Mapping[str, Any]) -> None:
        self.note("open")

    def write(self, record: StepRecord) -> None:
        self.note("write")

    def __call__(self, finding: Finding) -> None:
        self.note("finding")

    def close(self) -> None:
        self.note("close")

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.failing:
            raise OSError(f"disk full in {call}")


def run(sinks: SinkSet) -> None:
    sinks.open(TENSORS, {"schema": 1})
    for _ in range(2):
        sinks.write(RECORD)
        sinks(FINDING)
    sinks.close()


def test_every_method_of_a_sink_is_called_in_order() -> None:
    """A full sink hears of the run's begin, its steps, its findings and its end."""
    sink = Recorder()
    run(SinkSet([sink]))
    assert sink.calls == ["open", "write", "finding", "write", "finding", "close"]


def test_a_plain_function_is_a_sink() -> None:
    """A function of one argument gets the findings and nothing else."""
    findings: list[Finding] = []
    run(SinkSet([findings.append]))
    assert findings == [FINDING, FINDING]


def test_arguments_arrive_as_they_are() -> None:
    """Sinks get the very tensors, attributes and records of the run."""
    seen: list[object] = []

    class Keeper:
        def open(self, tensors: object, attributes: object) -> None:
            seen.extend([tensors, attributes])

        def write(self, record: object) -> None:
            seen.append(record)

        def __call__(self, finding: object) -> None:
            seen.append(finding)

    attributes = {"schema": 1}
    sinks = SinkSet([Keeper()])
    sinks.open(TENSORS, attributes)
    sinks.write(RECORD)
    sinks(FINDING)
    sinks.close()
    assert all(got is given for got, given in zip(seen, [TENSORS, attributes, RECORD, FINDING], strict=True))


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ("open", ["open"]),
        ("write", ["open", "write", "close"]),
        ("finding", ["open", "write", "finding", "close"]),
        ("close", ["open", "write", "finding", "write", "finding", "close"]),
    ],
)
def test_a_failing_sink_is_disabled_and_the_others_go_on(failing: str, expected: list[str]) -> None:
    """One warning, no more calls but a closing one, and the neighbours on both sides miss nothing."""
    before, broken, after = Recorder(), Recorder(failing), Recorder()
    with pytest.warns(RuntimeWarning, match=f"The sink Recorder raised OSError .*disk full in {failing}") as caught:
        run(SinkSet([before, broken, after]))
    assert len(caught) == 1
    assert broken.calls == expected
    assert before.calls == after.calls == ["open", "write", "finding", "write", "finding", "close"]


def test_a_sink_that_also_fails_to_close_warns_once() -> None:
    """The echo of the first error is not told."""
    with pytest.warns(RuntimeWarning, match="disk full in write") as caught:
        run(SinkSet([Recorder("write", "close")]))
    assert len(caught) == 1


def test_a_disabled_sink_gets_a_new_chance_in_the_next_run() -> None:
    """Opening again makes every sink active."""
    sink = Recorder("write")
    sinks = SinkSet([sink])
    with pytest.warns(RuntimeWarning, match="disk full"):
        run(sinks)
    sink.failing = ()
    sink.calls.clear()
    run(sinks)
    assert sink.calls == ["open", "write", "finding", "write", "finding", "close"]


def test_the_warning_names_a_function_and_points_at_the_caller() -> None:
    """The warning carries the sink's name, and the line outside this package that led to it."""

    def alert(finding: Finding) -> None:
        raise ValueError("no network")

    with pytest.warns(RuntimeWarning, match=r"alert raised ValueError in __call__: no network") as caught:
        SinkSet([alert])(FINDING)
    assert caught[0].filename == __file__


def test_an_interrupt_is_not_swallowed() -> None:
    """Ctrl-C inside a sink stops the run."""

    def interrupted(finding: Finding) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SinkSet([interrupted])(FINDING)


def test_no_sinks_is_fine() -> None:
    """An empty set does nothing, quietly."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(SinkSet([]))


def test_something_not_callable_is_refused() -> None:
    """A path instead of a sink is refused when the set is made."""
    with pytest.raises(TypeError, match=r"Received 'run\.parquet' of type str among the sinks\. Expected callables"):
        SinkSet(["run.parquet"])  # type: ignore[list-item]
