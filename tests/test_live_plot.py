import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from keras_gradwatch.records import STATISTICS, Finding, StepRecord, TensorInfo
from keras_gradwatch.sinks import LivePlot, SinkSet, live_plot

TENSORS = tuple(
    TensorInfo(layer=f"dense_{k}", tensor=f"dense_{k}/kernel", role="weight", depth=k, shape=(2, 3)) for k in range(3)
)
FINDING = Finding(finding="vanishing", layer="dense_0", first_step=1, last_step=9, message="falls by 10^6")


def record(step: int) -> StepRecord:
    statistics = np.full((3, len(STATISTICS)), 0.1)
    statistics[:, STATISTICS.index("nonfinite_count")] = 0
    return StepRecord(step=step, epoch=0, loss=1 / step, statistics=statistics, connected=np.ones(3, dtype=np.bool_))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still until it is moved."""
    now = [100.0]
    monkeypatch.setattr(live_plot.time, "monotonic", lambda: now[0])
    return now


def test_it_redraws_at_most_every_few_seconds(clock: list[float]) -> None:
    """Of a hundred steps in ten seconds, only every fifth second makes a picture, and the end makes one."""
    figures: list[Any] = []
    live = LivePlot(5, show=figures.append)
    live.open(TENSORS, {})
    for step in range(1, 101):
        clock[0] = 100 + step / 10
        live.write(record(step))
    assert len(figures) == 2
    live.close()
    assert len(figures) == 3
    assert figures[-1].get_suptitle() == "step 100 · epoch 0 · loss 0.01 · no findings so far"


def test_it_takes_a_twentieth_of_the_time_at_most(clock: list[float]) -> None:
    """A picture that takes two seconds is not drawn again before forty have passed."""
    figures: list[Any] = []

    def slow(figure: Any) -> None:
        figures.append(figure)
        clock[0] += 2

    live = LivePlot(1, show=slow)
    live.open(TENSORS, {})
    for step in range(1, 60):
        clock[0] += 1
        live.write(record(step))
    assert len(figures) == 2


def test_a_long_run_keeps_few_steps(clock: list[float]) -> None:
    """Ten thousand steps leave a few hundred in memory, from the first to the last."""
    live = LivePlot(show=lambda figure: None)
    live.open(TENSORS, {})
    for step in range(1, 10_001):
        live.write(record(step))
    steps = [record.step for record in live._records]
    assert 150 < len(steps) <= 400
    assert steps[0] == 1
    assert steps[-1] > 9_900


def test_findings_are_told_in_the_picture(clock: list[float]) -> None:
    """A finding shows in the title."""
    figures: list[Any] = []
    live = LivePlot(show=figures.append)
    live.open(TENSORS, {})
    live.write(record(1))
    live(FINDING)
    live.close()
    assert figures[0].get_suptitle().endswith("1 finding: vanishing in dense_0")


def test_a_second_run_starts_afresh(clock: list[float]) -> None:
    """What was drawn before does not show in the next run."""
    figures: list[Any] = []
    live = LivePlot(show=figures.append)
    for _ in range(2):
        live.open(TENSORS, {})
        live.write(record(1))
        live(FINDING)
        live.close()
    assert figures[1].get_suptitle() == figures[0].get_suptitle()


def test_in_a_notebook_the_picture_is_replaced_in_place(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first picture is displayed, each later one updates it; a new run gets a place of its own."""
    calls: list[str] = []

    class DisplayHandle:
        def display(self, figure: Any) -> None:
            calls.append("display")

        def update(self, figure: Any) -> None:
            calls.append("update")

    notebook = SimpleNamespace(get_ipython=object, display=SimpleNamespace(DisplayHandle=DisplayHandle))
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "IPython.display", notebook.display)
    live = LivePlot(5)
    for _ in range(2):
        live.open(TENSORS, {})
        live.write(record(1))
        clock[0] += 6
        live.write(record(2))
        live.close()
    assert calls == ["display", "update", "display", "update"]


def test_outside_of_a_notebook_it_warns_and_training_goes_on() -> None:
    """Without a notebook there is one warning, which says what to do instead."""
    sinks = SinkSet([LivePlot()])
    with pytest.warns(RuntimeWarning, match=r"this is no notebook. Call watch.plot\(\) after fit"):
        sinks.open(TENSORS, {})
    sinks.write(record(1))


@pytest.mark.parametrize(("seconds", "error"), [("5", TypeError), (0, ValueError), (float("nan"), ValueError)])
def test_bad_seconds_are_told_at_once(seconds: Any, error: type[Exception]) -> None:
    """A period that is no positive number is refused, with what to use."""
    with pytest.raises(error, match="Use every_seconds=5"):
        LivePlot(seconds)
