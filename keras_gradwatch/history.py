"""Everything seen in a run: collected step by step in plain arrays, handed out as one long pandas frame."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pandas as pd

from keras_gradwatch.files import read_history, write_history
from keras_gradwatch.marks import finding_column
from keras_gradwatch.records import (
    STATISTICS,
    VERDICTS,
    CheckResult,
    Finding,
    Float64Array,
    Int64Array,
    StepRecord,
    TensorInfo,
)
from keras_gradwatch.schema import PANDAS_VERSION, ROLES, SCHEMA, SCHEMA_VERSION, Column, categorical, schema_markdown
from keras_gradwatch.wide import wide

__all__ = [
    "SCHEMA",
    "SCHEMA_VERSION",
    "Column",
    "History",
    "check_frame",
    "read_history",
    "schema_markdown",
    "wide",
    "write_history",
]

BoolArray = npt.NDArray[np.bool_]

_CHECK_NUMBERS = ("check_error", "check_bar", "rounding_error")
_FIRST_CAPACITY = 64

#: Steps before and after an event that are never thinned out, and events that are remembered. Our choice: more than the
#: report shows, and so few that they do not count.
_BEFORE_EVENT, _AFTER_EVENT = 50, 10
_MOST_EVENTS = 16


# A structured array grows as one block: one record per step or check, every field in its own strided view.
class _Table:
    """Records in one array that doubles when full: appending costs O(1) amortised."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._buffer = np.empty(0, dtype)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def new(self) -> npt.NDArray[np.void]:
        """A view of one more record, uninitialised, shape ``[1]``."""
        if self._length == len(self._buffer):
            grown = np.empty(max(_FIRST_CAPACITY, 2 * self._length), self._buffer.dtype)
            grown[: self._length] = self._buffer
            self._buffer = grown
        self._length += 1
        return cast(npt.NDArray[np.void], self._buffer[self._length - 1 : self._length])

    def records(self) -> npt.NDArray[np.void]:
        """A view of all records."""
        return cast(npt.NDArray[np.void], self._buffer[: self._length])

    def keep(self, chosen: BoolArray) -> None:
        """Drop the records where ``chosen`` is False; the room they took is used again."""
        kept = self.records()[chosen]
        self._length = len(kept)
        self._buffer[: self._length] = kept


class History:
    """The rows of one run, gathered step by step at O(1) cost and turned into a frame when asked.

    A step gives one row per weight, also where nothing was measured; a step with a check gives one row per input, too.
    When ``max_rows`` is passed, the older half of the steps that hold neither a check nor a non-finite value loses
    every second one. This comes again as the run goes on, so that old times grow coarse and recent ones stay complete.
    Should it free less than an eighth of the steps, because nearly all of them are checked or non-finite, the older
    half of *all* steps loses every second one. The first step always stays, and so do the 50 sampled steps before the
    begin of a finding, and ten after it, for the first 16 of them. ``attrs["thinned"]`` counts the steps dropped.

    Args:
        tensors: weights and inputs of the model, each in network order; in the frame inputs come first.
        attributes: what else to keep in ``frame.attrs`` (settings, versions); must be fit for JSON.
        max_rows: rows to hold at most; one step is held however many it has. Default 5,000,000: half a million
            steps of ten tensors, about 0.3 GB, and for moments twice that (our choice).

    Raises:
        TypeError: ``attributes`` holds something JSON cannot hold.
        ValueError: ``max_rows`` is below 1.

    Example:
        >>> kernel = TensorInfo(layer="dense", tensor="dense/kernel", role="weight", depth=0, shape=(2, 2))
        >>> history = History([kernel], {"seed": 0})
        >>> numbers = np.array([[3.0, 1.5, 2.0, 0.0, 0.0, 1.0, 0.01]])
        >>> history.append(StepRecord(step=1, epoch=0, loss=0.5, statistics=numbers, connected=np.array([True])))
        >>> float(history.to_frame().loc[0, "grad_norm"])
        3.0
    """

    def __init__(
        self, tensors: Sequence[TensorInfo], attributes: Mapping[str, object], *, max_rows: int = 5_000_000
    ) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows is {max_rows}. Expected 1 or more. Leave it out to keep up to 5,000,000 rows.")
        # Inputs are nearest the data; the sort is stable, so weights keep the order of the statistics.
        self._tensors = tuple(sorted(tensors, key=lambda tensor: tensor.role == "weight"))
        self._attributes = _json_copy(attributes)
        self._max_rows = max_rows
        self._thinned = 0
        self._events: list[int] = []
        self._findings: tuple[Finding, ...] = ()
        self._frame: pd.DataFrame | None = None
        self._described = _tensor_columns(self._tensors)
        self._position = {_identity(tensor): index for index, tensor in enumerate(self._tensors)}
        self._is_weight = np.array([tensor.role == "weight" for tensor in self._tensors], np.bool_)
        self._num_weights = int(self._is_weight.sum())
        self._num_inputs = len(self._tensors) - self._num_weights
        step_fields = [
            ("step", np.int64),
            ("epoch", np.int64),
            ("loss", np.float64),
            ("check", np.int64),  # index into _checks, -1 for none
            ("statistics", np.float64, (self._num_weights, len(STATISTICS))),
        ]
        check_fields = [
            ("verdict", np.int8, (len(self._tensors),)),  # index into VERDICTS, -1 for none
            ("numbers", np.float64, (len(self._tensors), len(_CHECK_NUMBERS))),
        ]
        self._steps = _Table(np.dtype(step_fields))
        self._checks = _Table(np.dtype(check_fields))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._steps) * self._num_weights + len(self._checks) * self._num_inputs

    def append(self, record: StepRecord) -> None:
        """Take in one step. Checked tensors the history was not told of get no row.

        Args:
            record: the step; ``statistics`` has one row per *weight*, in network order.

        Raises:
            ValueError: ``statistics`` has another shape.
        """
        expected = (self._num_weights, len(STATISTICS))
        if record.statistics.shape != expected:
            raise ValueError(
                f"Step {record.step} has statistics of shape {record.statistics.shape}. Expected {expected}: a row for "
                f"each weight, a column for each statistic. Build the history with the tensors that are captured."
            )
        if not self._num_weights and record.check is None:
            return  # no rows
        self._append_step(record)
        if record.check is not None:
            self._append_check(record.check)
        self._frame = None
        while len(self) > self._max_rows and len(self._steps) > 1:
            self._thin()

    def set_findings(self, findings: Sequence[Finding]) -> None:
        """Replace the findings that mark rows in the ``findings`` column.

        Args:
            findings: all findings so far, each with the steps and tensors it spans.
        """
        self._findings = tuple(findings)
        self._frame = None

    def keep_around(self, step: int) -> None:
        """Something began at this step: how it came to that must not be thinned out."""
        if step not in self._events and len(self._events) < _MOST_EVENTS:
            self._events.append(step)

    def to_frame(self) -> pd.DataFrame:
        """All rows as a frame with the columns of :data:`SCHEMA`; yours to change.

        Returns:
            Oldest step first, tensors in network order within a step. Before the first step: no rows, the right dtypes.
        """
        if self._frame is None:
            self._frame = self._build(0)
        # From pandas 3 on, copy-on-write makes the shallow copy safe to change.
        return self._frame.copy(deep=PANDAS_VERSION < (3, 0))

    def record_tail(self, rows: int) -> pd.DataFrame:
        """The last rows, without building the rest.

        Args:
            rows: how many; all of them if there are fewer.

        Returns:
            The same as ``to_frame().tail(rows)``, index included.
        """
        num_steps = -(-rows // max(1, self._num_weights))  # a step held has a row per weight, and one at least
        return self._build(max(0, len(self._steps) - num_steps)).tail(rows)

    def _append_step(self, record: StepRecord) -> None:
        row = self._steps.new()
        row["step"], row["epoch"] = record.step, record.epoch
        row["loss"] = np.nan if record.loss is None else record.loss
        row["check"] = -1 if record.check is None else len(self._checks)
        row["statistics"] = record.statistics

    def _append_check(self, result: CheckResult) -> None:
        row = self._checks.new()
        row["verdict"], row["numbers"] = -1, np.nan
        for tensor, check in zip(result.tensors, result.checks, strict=True):
            position = self._position.get(_identity(tensor))
            if position is not None:
                row["verdict"][0, position] = VERDICTS.index(check.verdict)
                row["numbers"][0, position] = check.error, check.bar, check.rounding_error

    def _thin(self) -> None:
        steps = self._steps.records()
        # A NaN loss may only mean "not observed"; when it was real, the gradients are not finite either.
        infinite = np.isinf(steps["loss"])
        infinite |= (steps["statistics"][:, :, STATISTICS.index("nonfinite_count")] > 0).any(axis=1)
        ordinary = ~infinite & (steps["check"] < 0)
        for event in self._events:
            place = int(np.searchsorted(steps["step"], event))
            ordinary[max(0, place - _BEFORE_EVENT) : place + _AFTER_EVENT + 1] = False
        chosen = _without_every_second(ordinary)
        if np.count_nonzero(~chosen) < len(steps) / 8:
            chosen = _without_every_second(np.ones(len(steps), np.bool_))
        self._thinned += int(np.count_nonzero(~chosen))
        self._checks.keep(chosen[steps["check"] >= 0])
        self._steps.keep(chosen)
        # Checks are stored in the order of their steps, so those left are numbered through again.
        checked = self._steps.records()["check"] >= 0
        self._steps.records()["check"][checked] = np.arange(len(self._checks))

    def _build(self, first: int) -> pd.DataFrame:
        """Rows of the steps from index ``first`` on."""
        steps = self._steps.records()[first:]
        present = self._is_weight | (steps["check"] >= 0)[:, None]  # [steps, tensors]
        step, tensor = np.nonzero(present)
        columns: dict[str, Any] = {name: steps[name][step] for name in ("step", "epoch", "loss")}
        columns |= {name: values.take(tensor) for name, values in self._described.items()}
        columns |= _statistic_columns(steps["statistics"], self._is_weight[tensor])
        columns |= _check_columns(self._checks.records(), steps["check"][step], tensor)
        columns["findings"] = finding_column(self._findings, columns["step"], tensor, self._tensors)
        index = pd.RangeIndex(len(self) - len(step), len(self))
        frame = pd.DataFrame({column.name: columns[column.name] for column in SCHEMA}, index=index, copy=False)
        frame.attrs.update({"schema_version": SCHEMA_VERSION} | self._attributes | {"thinned": self._thinned})
        return frame


def check_frame(result: CheckResult) -> pd.DataFrame:
    """One gradient check as a frame, one row per tensor in network order.

    Args:
        result: the check.

    Returns:
        Columns ``layer, tensor, role, depth, size, check, check_error, check_bar, rounding_error`` with the dtypes of
        :data:`SCHEMA`, then ``factor`` (float64) and ``reason`` (str).
    """
    checks = result.checks
    columns: dict[str, Any] = _tensor_columns(result.tensors)
    columns["check"] = pd.Categorical([check.verdict for check in checks], dtype=categorical(VERDICTS))
    columns["check_error"] = np.array([check.error for check in checks], np.float64)
    columns["check_bar"] = np.array([check.bar for check in checks], np.float64)
    columns["rounding_error"] = np.array([check.rounding_error for check in checks], np.float64)
    columns["factor"] = np.array([check.factor for check in checks], np.float64)
    columns["reason"] = pd.array([check.reason for check in checks], dtype="str")
    return pd.DataFrame(columns)


def _identity(tensor: TensorInfo) -> tuple[str, str, str]:
    return tensor.role, tensor.layer, tensor.tensor


def _json_copy(attributes: Mapping[str, object]) -> dict[str, Any]:
    """The attributes as they will come back from a file: tuples as lists, keys as strings."""
    try:
        return cast(dict[str, Any], json.loads(json.dumps(dict(attributes))))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"Received attributes that JSON cannot hold ({error}): {dict(attributes)!r}. Expected strings, numbers, "
            f"booleans, None, and lists and dicts of them. Convert the rest, for instance with str() or .item()."
        ) from error


def _without_every_second(ordinary: BoolArray) -> BoolArray:
    """Which steps to keep when of the older half of the ``ordinary`` ones each second goes, and the first stays."""
    candidates = np.flatnonzero(ordinary)
    chosen = np.ones(len(ordinary), np.bool_)
    chosen[candidates[1 : max(2, len(candidates) // 2) : 2]] = False
    return chosen


def _tensor_columns(tensors: Sequence[TensorInfo]) -> dict[str, Any]:
    """What is known of the tensors, as columns of one row each."""
    layers = [tensor.layer for tensor in tensors]
    names = [tensor.tensor for tensor in tensors]
    return {
        "layer": pd.Categorical(layers, dtype=categorical(dict.fromkeys(layers))),
        "tensor": pd.Categorical(names, dtype=categorical(dict.fromkeys(names))),
        "role": pd.Categorical([tensor.role for tensor in tensors], dtype=categorical(ROLES)),
        "depth": np.array([tensor.depth for tensor in tensors], np.int64),
        "size": np.array([tensor.size for tensor in tensors], np.int64),
    }


def _statistic_columns(statistics: Float64Array, is_weight: BoolArray) -> dict[str, Any]:
    """Columns from ``[steps, weights, statistics]``, for rows of which only those of weights have statistics."""
    columns: dict[str, Any] = {}
    for index, name in enumerate(STATISTICS):
        column = np.full(len(is_weight), np.nan)
        column[is_weight] = statistics[:, :, index].ravel()
        columns[name] = column
    columns["nonfinite_count"] = np.nan_to_num(columns["nonfinite_count"], nan=0.0).astype(np.int64)
    return columns


def _check_columns(checks: npt.NDArray[np.void], check: Int64Array, tensor: npt.NDArray[np.intp]) -> dict[str, Any]:
    """Columns for rows that belong to the given check (-1 for none) and tensor."""
    checked = np.flatnonzero(check >= 0)
    verdict = np.full(len(check), -1, np.int8)
    verdict[checked] = checks["verdict"][check[checked], tensor[checked]]
    numbers = np.full((len(_CHECK_NUMBERS), len(check)), np.nan)
    numbers[:, checked] = checks["numbers"][check[checked], tensor[checked]].T
    columns: dict[str, Any] = dict(zip(_CHECK_NUMBERS, numbers, strict=True))
    columns["check"] = pd.Categorical.from_codes(verdict, dtype=categorical(VERDICTS))
    return columns
