"""A history in CSV that grows while a run goes on: rows, and between them lines with the account of the run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pandas as pd

#: Begins a line that holds ``frame.attrs`` as JSON.
HEADER = "# keras_gradwatch "
_END = "\r\n"


def account_line(account: Mapping[str, Any]) -> str:
    """One line whatever it holds: JSON escapes the line ends inside strings."""
    return f"{HEADER}{json.dumps(dict(account))}{_END}"


class CSVLog:
    """The file of a :class:`~keras_gradwatch.sinks.CSVSink`.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._titled = False

    def open(self, *, anew: bool) -> None:
        """Begin the file, or go on after the last whole line of one that is there."""
        if self._file is not None:
            self._file.close()  # a run that ended in an exception
            self._file = None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if anew and self._path.exists():
            os.replace(self._path, f"{self._path}.old")
        self._file = self._path.open("ab", buffering=0)
        self._file.truncate(_sound_size(self._path.read_bytes()))
        self._titled = False

    def put(self, frame: pd.DataFrame) -> None:
        """Append rows; the first of each run come with the names of the columns."""
        self._append(frame.to_csv(index=False, header=not self._titled, lineterminator=_END))
        self._titled = True

    def note(self, account: Mapping[str, Any]) -> None:
        """Append a line with the account so far."""
        self._append(account_line(account))
        self._titled = False

    def close(self, account: Mapping[str, Any]) -> None:
        """Append the last account."""
        if self._file is not None:
            try:
                self.note(account)
            finally:
                self._file.close()
                self._file = None

    def _append(self, text: str) -> None:
        assert self._file is not None  # noqa: S101  opened before anything is written
        data = text.encode()
        written = self._file.write(data)
        if written != len(data):
            raise OSError(f"only {written} of {len(data)} bytes could be written: is the disk full?")


def _sound_size(data: bytes) -> int:
    """Length up to the last line end outside of quotes: what follows was cut off by a crash."""
    size = data.rfind(b"\n") + 1
    begin = data.rfind(b"\n" + HEADER.encode(), 0, size) + 1  # an account's own quotes do not come in pairs
    begin = data.index(b"\n", begin) + 1 if data.startswith(HEADER.encode(), begin) else begin
    while size > begin and data.count(b'"', begin, size) % 2:
        size = data.rfind(b"\n", begin, size - 1) + 1 or begin
    return size


def sections(data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Accounts, each with the rows that follow it, their column names first.

    A file that begins with a line of ours is cut after its last whole row.
    """
    marker = HEADER.encode()
    if data.startswith(marker):
        data = data[: _sound_size(data)]
    account: dict[str, Any] = {}
    rows = start = 0
    while start < len(data):
        told = _account_of(data, start) if data.startswith(marker, start) else None
        if told is not None:
            if start > rows:
                yield account, data[rows:start]
            account, rows = told, data.index(b"\n", start) + 1
        following = data.find(b"\n" + marker, start if told is None else rows - 1)
        start = following + 1 if following >= 0 else len(data)
    yield account, data[rows:]


def _account_of(data: bytes, start: int) -> dict[str, Any] | None:
    """What a line of ours holds; None where a quoted name merely looks like one."""
    try:
        return dict(json.loads(data[start + len(HEADER) : data.index(b"\n", start)]))
    except ValueError:
        return None
