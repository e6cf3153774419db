"""Sinks that write files: nothing flushed is lost, whatever happens to the process."""

import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from keras_gradwatch import CSVSink, ParquetSink
from keras_gradwatch.history import History, read_history
from keras_gradwatch.journal import journal_of
from keras_gradwatch.records import STATISTICS, CheckResult, Finding, StepRecord, TensorCheck, TensorInfo
from keras_gradwatch.sinks import SinkSet

TENSORS = (
    TensorInfo(layer="image", tensor="image", role="input", depth=0, shape=(8, 3)),
    TensorInfo(layer="dense", tensor="dense/kernel", role="weight", depth=1, shape=(3, 4)),
    TensorInfo(layer='out, "last"\n', tensor='out, "last"\n/kernel', role="weight", depth=2, shape=(4, 1)),
)
FINDING = Finding(
    finding="vanishing", layer="dense", first_step=2, last_step=3, message="falls", tensors=("dense/kernel",)
)
SINKS = [(ParquetSink, "run.parquet"), (CSVSink, "run.csv")]


def record(step: int, epoch: int = 0) -> StepRecord:
    statistics = np.random.default_rng(step).lognormal(size=(2, len(STATISTICS)))
    statistics[:, STATISTICS.index("nonfinite_count")] = 0
    checks = tuple(TensorCheck(tensor=t.tensor, verdict="ok", error=1e-9, bar=1e-6) for t in TENSORS)
    check = CheckResult(tensors=TENSORS, checks=checks) if step % 4 == 1 else None
    return StepRecord(
        step=step, epoch=epoch, loss=1 / step, statistics=statistics, connected=np.ones(2, np.bool_), check=check
    )


def expected(steps: Any, findings: Any = ()) -> pd.DataFrame:
    history = History(TENSORS, {})
    for step in steps:
        history.append(record(step))
    history.set_findings(findings)
    return history.to_frame()


def same(read: pd.DataFrame, wanted: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(read, wanted, check_exact=True, check_index_type=False)


@pytest.mark.parametrize(("sink_class", "name"), SINKS)
def test_a_finished_file_holds_the_history(sink_class: Any, name: str, tmp_path: Path) -> None:
    """Rows, order, dtypes and findings of a run written in small portions are those of the history frame."""
    sink = sink_class(tmp_path / name, flush_rows=5)
    sink.open(TENSORS, {"seed": 7, "first_step": 1})
    for step in range(1, 11):
        sink.write(record(step))
        if step == 3:
            sink(FINDING)
    sink.sum_up({"findings": [{**vars_of(FINDING), "last_step": 7}], "cost": {"share": 0.1}})
    sink.close()
    frame = read_history(tmp_path / name)
    same(frame, expected(range(1, 11), [Finding(**{**vars_of(FINDING), "last_step": 7})]))
    assert frame.attrs["cost"] == {"share": 0.1}
    assert frame.attrs["seed"] == 7
    assert frame.attrs["findings"][0]["message"] == "falls"
    assert not journal_of(tmp_path / name).exists()


def vars_of(finding: Finding) -> dict[str, Any]:
    return {name: getattr(finding, name) for name in Finding.__slots__}


@pytest.mark.parametrize(("sink_class", "name"), SINKS)
def test_what_is_flushed_can_be_read_at_any_time(sink_class: Any, name: str, tmp_path: Path) -> None:
    """An open file is readable: the rows up to the last flush, and the findings so far."""
    sink = sink_class(tmp_path / name, flush_rows=4, flush_seconds=3600)
    sink.open(TENSORS, {"first_step": 1})
    assert read_history(tmp_path / name).empty
    for step in (1, 2, 3):
        sink.write(record(step))
    same(read_history(tmp_path / name), expected([1, 2]))
    sink(FINDING)
    frame = read_history(tmp_path / name)
    same(frame, expected([1, 2, 3], [FINDING]))
    assert [f["finding"] for f in frame.attrs["findings"]] == ["vanishing"]
    sink.close()


@pytest.mark.parametrize("seconds", [0.0, 3600.0])
def test_rows_wait_for_a_number_or_a_time(seconds: float, tmp_path: Path) -> None:
    """With no time to wait each step is written at once; with an hour, none before there are enough rows."""
    sink = CSVSink(tmp_path / "run.csv", flush_seconds=seconds)
    sink.open(TENSORS, {})
    sink.write(record(1))
    assert len(read_history(tmp_path / "run.csv")) == (3 if seconds == 0.0 else 0)
    sink.close()


@pytest.mark.parametrize(("sink_class", "name"), SINKS)
@pytest.mark.parametrize("finished", [True, False])
def test_a_resumed_run_continues_its_file(sink_class: Any, name: str, finished: bool, tmp_path: Path) -> None:
    """Steps taken again after a resume replace those in the file: each step is there once, in order."""
    for begin, end in ((1, 8), (6, 12)):
        sink = sink_class(tmp_path / name, flush_rows=3)
        sink.open(TENSORS, {"first_step": begin})
        for step in range(begin, end + 1):
            sink.write(record(step))
        sink.flush()
        if finished:
            sink.close()
        else:
            abandon(sink)
    same(read_history(tmp_path / name), expected(range(1, 13)))
    if not finished:  # a third one takes over after step 12, and closes
        sink = sink_class(tmp_path / name)
        sink.open(TENSORS, {"first_step": 13})
        sink.write(record(13))
        sink.close()
        same(read_history(tmp_path / name), expected(range(1, 14)))


@pytest.mark.parametrize(("sink_class", "name"), SINKS)
def test_a_new_run_moves_the_old_file_aside(sink_class: Any, name: str, tmp_path: Path) -> None:
    """A run from step 1 begins a new file, and the old one can still be read under its new name."""
    for steps in ((1, 2, 3), (1,)):
        sink = sink_class(tmp_path / name)
        sink.open(TENSORS, {"first_step": 1})
        for step in steps:
            sink.write(record(step))
        sink.close()
    same(read_history(tmp_path / name), expected([1]))
    os.rename(tmp_path / f"{name}.old", tmp_path / f"old-{name}")
    same(read_history(tmp_path / f"old-{name}"), expected([1, 2, 3]))


@pytest.mark.parametrize(("sink_class", "name"), SINKS)
def test_a_torn_end_is_dropped_and_written_over(sink_class: Any, name: str, tmp_path: Path) -> None:
    """Cut anywhere in the last portion, a file holds the steps before it, and takes more steps after a resume."""
    sink = sink_class(tmp_path / name, flush_rows=1)
    sink.open(TENSORS, {"first_step": 1})
    for step in (1, 2):
        sink.write(record(step))
    file = journal_of(tmp_path / name) if name == "run.parquet" else tmp_path / name
    sound = file.stat().st_size
    sink.write(record(3))
    whole = file.read_bytes()
    for cut in range(sound, len(whole) - 1, 61):
        file.write_bytes(whole[:cut])
        read = read_history(tmp_path / name)
        same(read[read.step < 3].reset_index(drop=True), expected([1, 2]))
        resumed = sink_class(tmp_path / name, flush_rows=1)
        resumed.open(TENSORS, {"first_step": 3})
        resumed.write(record(3))
        same(read_history(tmp_path / name), expected([1, 2, 3]))
        abandon(resumed)
    abandon(sink)


def abandon(sink: Any) -> None:
    """What a killed process leaves behind: an open file, and nothing of what was still in memory."""
    sink._store._file.close()


PROGRAM = """
import sys, time
sys.path[:0] = {path!r}
from test_tables import *
sink = {sink}({file!r}, flush_rows=20, flush_seconds=3600)
sink.open(TENSORS, {{"first_step": int(sys.argv[1])}})
for step in range(int(sys.argv[1]), 10**9):
    sink.write(record(step))
    print(step if not len(sink._history) else "", flush=True)
"""


@pytest.mark.parametrize(("sink_class", "name"), SINKS)
def test_kill_loses_nothing_that_was_flushed(sink_class: Any, name: str, tmp_path: Path) -> None:
    """After ``kill -9`` at some moment every flushed step is there; resumed and killed again, each is there once."""
    program = textwrap.dedent(PROGRAM).format(
        path=[str(Path(__file__).parent)], sink=sink_class.__name__, file=str(tmp_path / name)
    )
    begin = 1
    for lines in (60, 45):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(begin)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        assert process.stdout is not None
        told = [process.stdout.readline().strip() for _ in range(lines)]
        process.send_signal(signal.SIGKILL)
        told += process.stdout.read().split("\n")
        process.stdout.close()
        process.wait()
        flushed = max(int(line) for line in told if line.strip())
        frame = read_history(tmp_path / name)
        last = int(frame["step"].max())
        assert flushed <= last <= flushed + 20
        same(frame, expected(range(1, last + 1)))
        begin = flushed - 10


def test_a_failing_disk_costs_one_warning_and_nothing_that_was_written(tmp_path: Path) -> None:
    """A sink whose file cannot grow is dropped with one warning; what it wrote before stays readable."""
    sink = ParquetSink(tmp_path / "run.parquet", flush_rows=1)
    sinks = SinkSet([sink])
    sinks.open(TENSORS, {"first_step": 1})
    sinks.write(record(1))
    real = sink._store._file  # type: ignore[attr-defined]

    class Full:
        def write(self, data: bytes) -> int:
            return int(real.write(data[: len(data) // 2]))

        def close(self) -> None:
            real.close()

    sink._store._file = Full()  # type: ignore[attr-defined]
    with pytest.warns(RuntimeWarning, match="is the disk full"):
        sinks.write(record(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sinks.write(record(3))
        sinks.close()
    same(read_history(tmp_path / "run.parquet"), expected([1]))


@pytest.mark.skipif(os.name == "nt", reason="/dev/null is a file that cannot be a folder on POSIX systems")
def test_a_folder_that_cannot_be_made_is_one_warning() -> None:
    """Training goes on without the sink."""
    sinks = SinkSet([CSVSink("/dev/null/run.csv")])
    with pytest.warns(RuntimeWarning, match="CSVSink raised"):
        sinks.open(TENSORS, {})
    sinks.write(record(1))
    sinks.close()


@pytest.mark.parametrize("sink_class", [ParquetSink, CSVSink])
def test_a_wrong_ending_or_number_is_told(sink_class: Any, tmp_path: Path) -> None:
    """The message says what came and what was expected."""
    with pytest.raises(ValueError, match=r"run\.txt'\. Expected one that ends in \."):
        sink_class(tmp_path / "run.txt")
    name = "run.csv" if sink_class is CSVSink else "run.parquet"
    with pytest.raises(ValueError, match=r"flush_rows=0\. Expected 0 seconds or more and 1 row"):
        sink_class(tmp_path / name, flush_rows=0)


def test_a_foreign_journal_is_told_and_left_alone(tmp_path: Path) -> None:
    """Something else under the journal's name is not touched."""
    journal_of(tmp_path / "run.parquet").write_bytes(b"my thesis")
    sink = ParquetSink(tmp_path / "run.parquet")
    with pytest.raises(ValueError, match="no journal"):
        sink.open(TENSORS, {"first_step": 5})
    assert journal_of(tmp_path / "run.parquet").read_bytes() == b"my thesis"
    with pytest.raises(ValueError, match="holds no gradient history"):
        read_history(tmp_path / "run.parquet")
