"""Sinks for trackers, with the real libraries in their offline modes."""

import contextlib
import json
import math
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_gradwatch.records import STATISTICS, CheckResult, Finding, StepRecord, TensorCheck, TensorInfo
from keras_gradwatch.sinks import MLflowSink, SinkSet, TensorBoardSink, TrackioSink, WandbSink
from keras_gradwatch.sinks.trackers import TrackerSink, scalars_of

TENSORS = (
    TensorInfo(layer="image", tensor="image", role="input", depth=0, shape=(8, 3)),
    TensorInfo(layer="block/dense", tensor="block/dense/kernel", role="weight", depth=1, shape=(3, 4)),
    TensorInfo(layer="block/dense", tensor="block/dense/bias", role="weight", depth=1, shape=(4,)),
    TensorInfo(layer="head (1)", tensor="head (1)/kernel", role="weight", depth=2, shape=(4, 1)),
)
FINDING = Finding(
    finding="vanishing", layer="block/dense", first_step=3, last_step=3, message="falls by 10^6", advice="try relu"
)


def record(step: int, *, check: bool = False, norm: float = 3.0) -> StepRecord:
    statistics = np.ones((3, len(STATISTICS)))
    statistics[:, STATISTICS.index("grad_norm")] = [norm, 4.0, 12.0]
    statistics[:, STATISTICS.index("update_ratio")] = [0.01, 0.02, 0.03]
    checks = tuple(TensorCheck(tensor=t.tensor, verdict="ok", error=1e-9 * (n + 1)) for n, t in enumerate(TENSORS))
    return StepRecord(
        step=step, epoch=0, loss=0.5, statistics=statistics, connected=np.ones(3, np.bool_),
        check=CheckResult(tensors=TENSORS, checks=checks) if check else None,
    )  # fmt: skip


def run(sink: Any, steps: range = range(1, 6)) -> None:
    """Five steps, the first checked, with a finding at the third; no sink may fail."""
    sinks = SinkSet([sink])
    sinks.open(TENSORS, {"first_step": steps.start})
    for step in steps:
        sinks.write(record(step, check=step == 1))
        if step == 3:
            sinks(FINDING)
    sinks.close()


def test_a_step_becomes_a_number_per_layer() -> None:
    """Norms of layers add as squares, ratios give the largest, errors the worst."""
    values = scalars_of(TENSORS, record(1, check=True))
    assert values == {
        "loss": 0.5, "global_grad_norm": 13.0, "grad_norm/block/dense": 5.0, "update_ratio/block/dense": 0.02,
        "grad_norm/head (1)": 12.0, "update_ratio/head (1)": 0.03,
        "check_error/image": 1e-9, "check_error/block/dense": pytest.approx(3e-9),
        "worst_check_error": pytest.approx(4e-9),
        "check_error/head (1)": pytest.approx(4e-9),
    }  # fmt: skip
    assert math.isnan(scalars_of(TENSORS, record(1, norm=math.nan))["grad_norm/block/dense"])


class Told:
    """A tracker that remembers."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def start(self, attributes: Any) -> None: ...
    def tell(self, finding: Finding) -> None: ...
    def finish(self) -> None: ...
    def distribution(self, name: str, values: Any, step: int) -> None: ...
    def scalars(self, values: Any, step: int) -> None:
        self.steps.append(step)


def test_one_of_so_many_steps_is_sent_and_each_checked_one() -> None:
    """With every=3: steps 1, 4, 7, and the check at 6."""
    told = Told()
    sink = TrackerSink(told, every=3)
    sink.open(TENSORS, {})
    for step in range(1, 9):
        sink.write(record(step, check=step == 6))
    assert told.steps == [1, 4, 6, 7]
    with pytest.raises(ValueError, match="every=0"):
        TrackerSink(told, every=0)


@pytest.mark.parametrize(
    ("sink", "module"),
    [(TensorBoardSink, "tensorboard"), (WandbSink, "wandb"), (MLflowSink, "mlflow"), (TrackioSink, "trackio")],
)
def test_a_missing_library_is_named_with_its_extra(sink: Any, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what to install, when the sink is made and not in the middle of training."""
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=rf"keras-gradwatch\[{module}\]"):
        sink("logs") if sink is TensorBoardSink else sink()


def test_tensorboard_reads_scalars_and_findings(tmp_path: Path) -> None:
    """TensorBoard's own reader finds every number, the finding's words, and the histogram that was asked for."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    run(TensorBoardSink(tmp_path, every=2, histograms=True))
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0}).Reload()
    tags = events.Tags()["tensors"]
    assert {"loss", "global_grad_norm", "grad_norm/block/dense", "check_error/image", "findings/vanishing"} <= set(tags)
    norms = events.Tensors("grad_norm/block/dense")
    assert [event.step for event in norms] == [1, 3, 5]
    assert [float(tensor_util.make_ndarray(event.tensor_proto)) for event in norms] == [5.0] * 3
    text = tensor_util.make_ndarray(events.Tensors("findings/vanishing")[0].tensor_proto).item()
    assert b"falls by 10^6" in text
    assert b"try relu" in text
    buckets = tensor_util.make_ndarray(events.Tensors("log10_grad_norm_of_tensors")[0].tensor_proto)
    assert buckets[:, 2].sum() == 3


def test_a_resumed_tensorboard_run_replaces_steps(tmp_path: Path) -> None:
    """After a resume at step 3 every step is there once."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator  # the dashboard's

    run(TensorBoardSink(tmp_path, every=1), range(1, 6))
    run(TensorBoardSink(tmp_path, every=1), range(3, 8))
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0}).Reload()
    assert [event.step for event in events.Tensors("loss")] == [1, 2, 3, 4, 5, 6, 7]


def test_mlflow_reads_metrics_and_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local store holds the numbers per step under allowed names, and the findings as a document."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    try:
        experiment = mlflow.create_experiment("watched", artifact_location=(tmp_path / "artifacts").as_uri())
        with mlflow.start_run(experiment_id=experiment) as active:
            run(MLflowSink(every=1))
            assert mlflow.active_run() is not None, "the user's run must stay open"
        client = mlflow.MlflowClient()
        points = client.get_metric_history(active.info.run_id, "gradwatch/grad_norm/block.dense")
        assert [(point.step, point.value) for point in points] == [(step, 5.0) for step in range(1, 6)]
        assert client.get_metric_history(active.info.run_id, "gradwatch/grad_norm/head _1_")
        document = json.loads(
            (tmp_path / "artifacts" / active.info.run_id / "artifacts/gradwatch/findings.json").read_text()
        )
        assert document["findings"][0]["message"] == "falls by 10^6"
    finally:
        mlflow.set_tracking_uri(None)


def test_wandb_records_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An offline run takes numbers and alert, and is finished by the sink that started it."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sink = WandbSink(every=1, project="watched", mode="offline", dir=str(tmp_path))
    sinks = SinkSet([sink])
    sinks.open(TENSORS, {"first_step": 1})
    active = wandb.run
    assert active is not None
    for step in range(1, 4):
        sinks.write(record(step))
    sinks(FINDING)
    assert active.summary["gradwatch/grad_norm/block/dense"] == 5.0
    assert active.summary["gradwatch/step"] == 3
    assert "falls by 10^6" in active.summary["gradwatch/findings/vanishing"]
    sinks.close()
    assert wandb.run is None
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


def test_trackio_records_locally(tmp_path: Path) -> None:
    """A local run holds the numbers. In a process of its own: Trackio reads its folder when it is imported."""
    pytest.importorskip("trackio")
    program = "from test_trackers import *; run(TrackioSink(every=1, project='watched', name='one'))"
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path), "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", program], env=environment, check=True)
    (database,) = tmp_path.rglob("watched*.db")
    with contextlib.closing(sqlite3.connect(database)) as connection:
        rows = [json.loads(row[0]) for row in connection.execute("select metrics from metrics order by step")]
    assert [row["gradwatch/grad_norm/block/dense"] for row in rows] == [5.0] * 5
