"""Sinks that keep the history in a file while training: what is written survives whatever happens to the process."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from keras_gradwatch._optional import require
from keras_gradwatch.csv_log import CSVLog
from keras_gradwatch.history import History
from keras_gradwatch.journal import Journal
from keras_gradwatch.records import Finding, StepRecord, TensorInfo

#: Never reached: rows leave memory at each flush, so none needs to be thinned.
_NO_LIMIT = 1 << 62


class Store(Protocol):
    """A file that rows are appended to."""

    def open(self, *, anew: bool) -> None:
        """Begin the file, or go on with one that is there."""

    def put(self, frame: pd.DataFrame) -> None:
        """Append rows of whole steps."""

    def note(self, account: Mapping[str, Any]) -> None:
        """Keep what the rows do not say: settings, findings, cost."""

    def close(self, account: Mapping[str, Any]) -> None:
        """The run is over."""


class TableSink:
    """Gathers rows and hands them to a store every so many rows or seconds, whichever comes first.

    A run that goes on where another stopped continues its file; steps it takes again replace those already there. A run
    that begins at step 1 finds no file: one of that name has been moved to ``<name>.old``.
    """

    def __init__(self, store: Store, *, flush_seconds: float, flush_rows: int) -> None:
        if not flush_seconds >= 0 or flush_rows < 1:
            raise ValueError(
                f"Received flush_seconds={flush_seconds}, flush_rows={flush_rows}. Expected 0 seconds or more and "
                "1 row or more. Leave them out for 5 seconds and 1,000 rows."
            )
        self._store, self._flush_seconds, self._flush_rows = store, flush_seconds, flush_rows
        self._tensors: tuple[TensorInfo, ...] = ()
        self._account: dict[str, Any] = {}
        self._findings: list[Finding] = []
        self._history = History((), {})
        self._flushed = 0.0

    def open(self, tensors: tuple[TensorInfo, ...], attributes: Mapping[str, Any]) -> None:
        """Begin or continue the file.

        Raises:
            OSError: it cannot be written.
        """
        self._tensors, self._findings = tensors, []
        self._history = History(tensors, attributes, max_rows=_NO_LIMIT)
        self._account = {str(key): value for key, value in self._history.to_frame().attrs.items()} | {"findings": []}
        self._store.open(anew=attributes.get("first_step", 1) == 1)
        self._store.note(self._account)
        self._flushed = time.monotonic()

    def write(self, record: StepRecord) -> None:
        """Take in one step."""
        self._history.append(record)
        if len(self._history) >= self._flush_rows or time.monotonic() - self._flushed >= self._flush_seconds:
            self.flush()

    def __call__(self, finding: Finding) -> None:
        """Take in a finding, and write down everything that led to it."""
        self._findings.append(finding)
        self._account["findings"] = [*self._account["findings"], _plain(finding)]
        self.flush()
        self._store.note(self._account)

    def sum_up(self, account: Mapping[str, Any]) -> None:
        """Take in what the run says of itself at the end of an epoch: findings with their last steps, cost, notes."""
        self._account |= account
        self.flush()
        self._store.note(self._account)

    def flush(self) -> None:
        """Hand all rows to the operating system: from then on only a crash of the machine could lose them."""
        if len(self._history):
            self._history.set_findings(self._findings)
            frame = self._history.to_frame()
            self._history = History(self._tensors, {}, max_rows=_NO_LIMIT)
            self._store.put(frame)
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Write what is left, and finish the file."""
        self.flush()
        self._store.close(self._account)


class ParquetSink(TableSink):
    """Writes the history to a Parquet file while training, in bounded memory. Needs the extra ``parquet``.

    Rows lie in ``<path>.journal`` until the run is over, for a Parquet file can be read only once its end is written.
    ``read_history(path)`` and the command line read both. A run killed at any moment loses the rows since the last
    flush.

    Args:
        path: ends in ``.parquet``. Folders on the way are made.
        flush_seconds: rows wait this long at most while steps go on; the end of an epoch and every finding flush, too.
        flush_rows: as many rows wait at most.

    Raises:
        ValueError: the path ends in something else, or a number is out of range.
        ModuleNotFoundError: pyarrow is not installed.

    Example:
        ``GradWatch(sinks=[ParquetSink("run.parquet")])``
    """

    def __init__(self, path: str | os.PathLike[str], *, flush_seconds: float = 5.0, flush_rows: int = 1000) -> None:
        require("pyarrow", "parquet")
        store = Journal(_checked(path, ".parquet"))
        super().__init__(store, flush_seconds=flush_seconds, flush_rows=flush_rows)


class CSVSink(TableSink):
    """Appends the history to a CSV file while training, in bounded memory.

    Lines that begin with ``# keras_gradwatch`` hold settings and findings; ``read_history(path)`` knows them. The
    column ``findings`` holds what was known when the row was written; ``read_history`` completes it.

    Args:
        path: ends in ``.csv``. Folders on the way are made.
        flush_seconds: rows wait this long at most while steps go on; the end of an epoch and every finding flush, too.
        flush_rows: as many rows wait at most.

    Raises:
        ValueError: the path ends in something else, or a number is out of range.

    Example:
        ``GradWatch(sinks=[CSVSink("run.csv")])``
    """

    def __init__(self, path: str | os.PathLike[str], *, flush_seconds: float = 5.0, flush_rows: int = 1000) -> None:
        super().__init__(CSVLog(_checked(path, ".csv")), flush_seconds=flush_seconds, flush_rows=flush_rows)


def _checked(path: str | os.PathLike[str], suffix: str) -> Path:
    if not os.fspath(path).lower().endswith(suffix):
        raise ValueError(
            f"Received path {os.fspath(path)!r}. Expected one that ends in {suffix}: read_history goes by the ending. "
            "Rename it, or take the sink of that format."
        )
    return Path(path)


def _plain(finding: Finding) -> dict[str, Any]:
    return {**asdict(finding), "tensors": list(finding.tensors), "explains": list(finding.explains)}
