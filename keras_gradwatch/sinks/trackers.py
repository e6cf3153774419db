"""Sinks that hand scalars and findings to the trackers people already look at: TensorBoard, W&B, MLflow, Trackio.

All send the same numbers: ``loss`` and ``global_grad_norm`` of the step; per layer ``grad_norm/<layer>`` and
``update_ratio/<layer>``; where there was a check, ``check_error/<layer>`` and ``worst_check_error``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from keras_gradwatch._optional import require
from keras_gradwatch.records import STATISTICS, CheckResult, Finding, Float64Array, StepRecord, TensorInfo

_NORM, _WEIGHT, _RATIO = (STATISTICS.index(name) for name in ("grad_norm", "weight_norm", "update_ratio"))


def scalars_of(tensors: Sequence[TensorInfo], record: StepRecord) -> dict[str, float]:
    """What trackers are told of one step.

    Args:
        tensors: weights (in the order of the statistics) and inputs.
        record: the step.

    Returns:
        Norms of layers are over all weights of a layer, update ratios those of the weight that moves most. What was not
        measured is left out; NaN and Inf stay, for they are news.
    """
    weights = [tensor for tensor in tensors if tensor.role == "weight"]
    values = {} if record.loss is None else {"loss": float(record.loss)}
    seen = record.connected & ~np.isnan(record.statistics[:, _WEIGHT])
    if seen.any():
        values["global_grad_norm"] = _norm(record.statistics[seen, _NORM])
    for layer in dict.fromkeys(tensor.layer for tensor in weights):
        own = seen & np.array([tensor.layer == layer for tensor in weights], np.bool_)
        if own.any():
            values[f"grad_norm/{layer}"] = _norm(record.statistics[own, _NORM])
            values[f"update_ratio/{layer}"] = float(np.max(record.statistics[own, _RATIO]))
    return values | (_errors(record.check) if record.check is not None else {})


def _norm(norms: Float64Array) -> float:
    return float(np.sqrt(np.sum(np.square(norms))))


def _errors(result: CheckResult) -> dict[str, float]:
    """The worst error of each layer and of the model."""
    found: dict[str, float] = {}
    for tensor, check in zip(result.tensors, result.checks, strict=True):
        for name in (f"check_error/{tensor.layer}", "worst_check_error") if np.isfinite(check.error) else ():
            found[name] = max(found.get(name, 0.0), check.error)
    return found


class Tracker(Protocol):
    """What a tracker must be able to do."""

    def start(self, attributes: Mapping[str, Any]) -> None:
        """A run begins, or goes on after ``attributes["first_step"] - 1`` steps."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Show numbers of one step."""

    def distribution(self, name: str, values: Float64Array, step: int) -> None:
        """Show how numbers are spread; called only where it was asked for."""

    def tell(self, finding: Finding) -> None:
        """Show a finding."""

    def finish(self) -> None:
        """The run is over."""


class TrackerSink:
    """Hands every so many sampled steps, each checked step and each finding to a tracker."""

    def __init__(self, tracker: Tracker, *, every: int, histograms: bool = False) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(
                f"Received every={every!r}. Expected an int of 1 or more: of how many sampled steps one is sent. "
                "Leave it out for 10."
            )
        self._tracker, self._every, self._histograms = tracker, every, histograms
        self._tensors: tuple[TensorInfo, ...] = ()
        self._seen = 0

    def open(self, tensors: tuple[TensorInfo, ...], attributes: Mapping[str, Any]) -> None:
        """Begin a run."""
        self._tensors, self._seen = tensors, 0
        self._tracker.start(attributes)

    def write(self, record: StepRecord) -> None:
        """Send the step if it is time."""
        if self._seen % self._every == 0 or record.check is not None:
            self._tracker.scalars(scalars_of(self._tensors, record), record.step)
            if self._histograms:
                norms = record.statistics[:, _NORM]
                norms = np.log10(norms[np.isfinite(norms) & (norms > 0)])
                self._tracker.distribution("log10_grad_norm_of_tensors", norms, record.step)
        self._seen += 1

    def __call__(self, finding: Finding) -> None:
        """Send the finding."""
        self._tracker.tell(finding)

    def close(self) -> None:
        """End the run."""
        self._tracker.finish()


class TensorBoardSink(TrackerSink):
    """Scalars per layer and findings as text, for TensorBoard. Needs the extra ``tensorboard``, on any backend.

    A resumed run into the same folder replaces the steps that it takes again.

    Args:
        log_dir: folder of the event files; made if it is not there.
        every: of how many sampled steps one is written; checked steps always are.
        histograms: also write, at the same steps, how the norms of all tensors are spread (about 1 kB each).

    Raises:
        ModuleNotFoundError: tensorboard is not installed.
        ValueError: ``every`` is not 1 or more.

    Example:
        ``GradWatch(sinks=[TensorBoardSink("logs/gradients")])``
    """

    def __init__(self, log_dir: str | os.PathLike[str], *, every: int = 10, histograms: bool = False) -> None:
        require("tensorboard.summary.writer.event_file_writer", "tensorboard")
        super().__init__(_TensorBoard(os.fspath(log_dir)), every=every, histograms=histograms)


class WandbSink(TrackerSink):
    """Scalars per layer under ``gradwatch/``, and findings as alerts, for Weights & Biases. Needs ``wandb``.

    It writes to the run given, or to the active one, or else starts one and finishes it in the end. Numbers are shown
    over ``gradwatch/step``, the optimizer's own count, and do not disturb the steps of other W&B callbacks.

    Args:
        run: a run of ``wandb.init``.
        every: of how many sampled steps one is sent; checked steps always are.
        init: arguments for ``wandb.init`` where a run is started, such as ``project``.

    Raises:
        ModuleNotFoundError: wandb is not installed.
        ValueError: ``every`` is not 1 or more.
    """

    def __init__(self, run: Any = None, *, every: int = 10, **init: Any) -> None:
        require("wandb", "wandb")
        super().__init__(_Wandb(run, init), every=every)


class MLflowSink(TrackerSink):
    """Scalars per layer under ``gradwatch/``, findings as ``gradwatch/findings.json``, for MLflow. Needs ``mlflow``.

    It writes to the active run, or else starts one and ends it in the end. The slashes in layer paths become dots,
    characters that MLflow does not allow in names ``_``.

    Args:
        every: of how many sampled steps one is sent; checked steps always are.
        start_run: arguments for ``mlflow.start_run`` where a run is started, such as ``run_name``.

    Raises:
        ModuleNotFoundError: mlflow is not installed.
        ValueError: ``every`` is not 1 or more.
    """

    def __init__(self, *, every: int = 10, **start_run: Any) -> None:
        require("mlflow", "mlflow")
        super().__init__(_MLflow(start_run), every=every)


class TrackioSink(TrackerSink):
    """Scalars per layer under ``gradwatch/``, and findings as alerts, for Trackio. Needs ``trackio``.

    It writes to the active run, or else starts one and finishes it in the end.

    Args:
        every: of how many sampled steps one is sent; checked steps always are.
        init: arguments for ``trackio.init`` where a run is started; ``project`` is ``"keras_gradwatch"`` if not given.

    Raises:
        ModuleNotFoundError: trackio is not installed.
        ValueError: ``every`` is not 1 or more.
    """

    def __init__(self, *, every: int = 10, **init: Any) -> None:
        require("trackio", "trackio")
        super().__init__(_Trackio(init), every=every)


class _TensorBoard:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._writer: Any = None

    def start(self, attributes: Mapping[str, Any]) -> None:
        writers = require("tensorboard.summary.writer.event_file_writer", "tensorboard")
        events = require("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._writer = writers.EventFileWriter(self._folder, filename_suffix=".gradwatch")
        # TensorBoard forgets later steps of an earlier run that died when it meets this.
        first = int(attributes.get("first_step", 1))
        session = events.SessionLog(status=events.SessionLog.START)
        self._writer.add_event(events.Event(step=first, session_log=session))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        plugin = require("tensorboard.plugins.scalar.summary_v2", "tensorboard")
        self._write([plugin.scalar_pb(name, value) for name, value in values.items()], step)

    def distribution(self, name: str, values: Float64Array, step: int) -> None:
        plugin = require("tensorboard.plugins.histogram.summary_v2", "tensorboard")
        self._write([plugin.histogram_pb(name, values, buckets=30)], step)

    def tell(self, finding: Finding) -> None:
        plugin = require("tensorboard.plugins.text.summary_v2", "tensorboard")
        text = f"**{_title(finding)}**\n\n{finding.message}\n\n{finding.advice}"
        self._write([plugin.text_pb(f"findings/{finding.finding}", text)], finding.first_step)
        self._writer.flush()

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, summaries: Sequence[Any], step: int) -> None:
        events = require("tensorboard.compat.proto.event_pb2", "tensorboard")
        import time

        for summary in summaries:
            self._writer.add_event(events.Event(summary=summary, step=step, wall_time=time.time()))


class _Wandb:
    def __init__(self, run: Any, init: Mapping[str, Any]) -> None:
        self._given, self._init = run, dict(init)
        self._run: Any = None
        self._started = False

    def start(self, attributes: Mapping[str, Any]) -> None:
        wandb = require("wandb", "wandb")
        self._run = self._given or wandb.run
        self._started = self._run is None
        if self._started:
            self._run = wandb.init(**self._init)
        self._run.define_metric("gradwatch/step", hidden=True)
        self._run.define_metric("gradwatch/*", step_metric="gradwatch/step")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({f"gradwatch/{name}": value for name, value in values.items()} | {"gradwatch/step": step})

    def distribution(self, name: str, values: Float64Array, step: int) -> None:
        """Never asked for."""

    def tell(self, finding: Finding) -> None:
        levels = require("wandb", "wandb").AlertLevel
        level = {"error": levels.ERROR, "warning": levels.WARN}.get(finding.severity, levels.INFO)
        self._run.alert(title=_title(finding), text=f"{finding.message} {finding.advice}", level=level)
        self._run.summary[f"gradwatch/findings/{finding.finding}"] = f"{_title(finding)}: {finding.message}"

    def finish(self) -> None:
        if self._started:
            self._run.finish()
        self._run, self._started = None, False


class _MLflow:
    def __init__(self, start_run: Mapping[str, Any]) -> None:
        self._start_run = dict(start_run)
        self._run: Any = None
        self._started = False
        self._findings: list[dict[str, Any]] = []

    def start(self, attributes: Mapping[str, Any]) -> None:
        mlflow = require("mlflow", "mlflow")
        self._run, self._findings = mlflow.active_run(), []
        self._started = self._run is None
        if self._started:
            self._run = mlflow.start_run(**self._start_run)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        named = {_allowed(name): value for name, value in values.items()}
        require("mlflow", "mlflow").log_metrics(named, step=step, run_id=self._run.info.run_id)

    def distribution(self, name: str, values: Float64Array, step: int) -> None:
        """Never asked for."""

    def tell(self, finding: Finding) -> None:
        names = ("finding", "layer", "tensor", "first_step", "severity", "message", "advice")
        self._findings.append({name: getattr(finding, name) for name in names})
        document = {"findings": self._findings}
        require("mlflow", "mlflow").log_dict(document, "gradwatch/findings.json", run_id=self._run.info.run_id)

    def finish(self) -> None:
        if self._started:
            require("mlflow", "mlflow").end_run()
        self._run, self._started = None, False


class _Trackio:
    def __init__(self, init: Mapping[str, Any]) -> None:
        self._init = {"project": "keras_gradwatch", **init}
        self._started = False

    def start(self, attributes: Mapping[str, Any]) -> None:
        trackio = require("trackio", "trackio")
        context = require("trackio.context_vars", "trackio")
        self._started = context.current_run.get() is None
        if self._started:
            trackio.init(**self._init)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        require("trackio", "trackio").log({f"gradwatch/{name}": value for name, value in values.items()}, step=step)

    def distribution(self, name: str, values: Float64Array, step: int) -> None:
        """Never asked for."""

    def tell(self, finding: Finding) -> None:
        trackio = require("trackio", "trackio")
        levels = trackio.AlertLevel
        level = {"error": levels.ERROR, "warning": levels.WARN}.get(finding.severity, levels.INFO)
        trackio.alert(title=_title(finding), text=f"{finding.message} {finding.advice}", level=level)

    def finish(self) -> None:
        if self._started:
            with suppress(RuntimeError):  # finished by the user's own code already
                require("trackio", "trackio").finish()
        self._started = False


def _allowed(name: str) -> str:
    """A name MLflow accepts, and its file store, too, where a slash is a folder and a layer may lie within another."""
    quantity, slash, layer = name.partition("/")
    layer = layer.replace("/", ".")
    return re.sub(r"[^\w\-./: ]", "_", f"gradwatch/{quantity}{slash}{layer}", flags=re.ASCII)


def _title(finding: Finding) -> str:
    return f"{finding.finding} in {finding.layer} since step {finding.first_step}"
