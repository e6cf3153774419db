"""Rows on their way to a Parquet file: appended block by block, so that a crash costs the last block at most.

A Parquet file can be read only once its end is written. Until a run is over its rows lie in a journal beside it: blocks
of a kind, a length, a checksum and a payload. Rows are Arrow streams, the account of the run is JSON.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd

from keras_gradwatch._optional import require
from keras_gradwatch.account import findings_of
from keras_gradwatch.marks import with_findings

_MAGIC = b"keras_gradwatch journal 1\n"
_HEAD = struct.Struct("<cQI")
ROWS, ACCOUNT = b"R", b"A"

#: Rows written to a Parquet file as one group.
_GROUP_ROWS = 100_000


class Journal:
    """The file of a :class:`~keras_gradwatch.sinks.ParquetSink`: a journal while the run goes on, Parquet afterwards.

    Args:
        path: of the Parquet file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def open(self, *, anew: bool) -> None:
        """Begin the journal, or go on with one that is there."""
        if self._file is not None:
            self._file.close()  # a run that ended in an exception
            self._file = None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        for path in (self._path, journal_of(self._path)) if anew else ():
            if path.exists():
                os.replace(path, f"{path}.old")
        self._file = open_journal(journal_of(self._path))

    def put(self, frame: pd.DataFrame) -> None:
        """Append rows."""
        self._append(ROWS, rows_of(frame))

    def note(self, account: Mapping[str, Any]) -> None:
        """Append the account so far."""
        self._append(ACCOUNT, json.dumps(dict(account)).encode())

    def close(self, account: Mapping[str, Any]) -> None:
        """Turn the journal into the Parquet file."""
        if self._file is not None:
            try:
                self.note(account)
            finally:
                self._file.close()
                self._file = None
            finish(self._path, account)

    def _append(self, kind: bytes, payload: bytes) -> None:
        assert self._file is not None  # noqa: S101  opened before anything is written
        append(self._file, kind, payload)


def journal_of(path: str | os.PathLike[str]) -> Path:
    """Where the rows lie that are still on their way to ``path``."""
    return Path(f"{os.fspath(path)}.journal")


def open_journal(path: Path) -> IO[bytes]:
    """The journal, ready for more blocks; a block that a crash has cut off is dropped.

    Raises:
        OSError: it cannot be written.
        ValueError: the file is something else.
    """
    sound = len(_MAGIC) + sum(_HEAD.size + len(payload) for _, payload in blocks(path)) if path.exists() else 0
    file = path.open("r+b" if path.exists() else "xb", buffering=0)
    try:
        if not sound:
            file.write(_MAGIC)
        file.seek(sound or len(_MAGIC))
        file.truncate()
    except OSError:
        file.close()
        raise
    return file


def append(file: IO[bytes], kind: bytes, payload: bytes) -> None:
    """One more block, handed to the operating system at once."""
    data = _HEAD.pack(kind, len(payload), zlib.crc32(payload)) + payload
    written = file.write(data)
    if written != len(data):
        raise OSError(f"only {written} of {len(data)} bytes could be written: is the disk full?")


def blocks(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Kind and payload of each block, as far as they are whole.

    Raises:
        ValueError: the file is no journal.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(len(_MAGIC))
        if start != _MAGIC[: len(start)]:
            raise ValueError(f"{path} is no journal of a gradient history")
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            kind, length, checksum = _HEAD.unpack(head)
            payload = file.read(length) if length <= size - file.tell() else b""
            if len(payload) != length or zlib.crc32(payload) != checksum:
                return
            yield kind, payload


def rows_of(frame: pd.DataFrame) -> bytes:
    """A frame as the payload of a block."""
    pa = require("pyarrow", "parquet")
    table = pa.Table.from_pandas(frame, preserve_index=False)
    sink = pa.BufferOutputStream()
    compression = "lz4" if pa.Codec.is_available("lz4") else None
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def pieces(path: str | os.PathLike[str]) -> Iterator[pd.DataFrame | dict[str, Any]]:
    """Rows and accounts in the order they came: of the finished file, if there is one, then of its journal."""
    pa = require("pyarrow", "parquet")
    if Path(path).exists():
        file = require("pyarrow.parquet", "parquet").ParquetFile(path)
        yield json.loads((file.schema_arrow.metadata or {}).get(b"PANDAS_ATTRS", b"{}"))
        for batch in file.iter_batches(_GROUP_ROWS):
            yield pa.Table.from_batches([batch]).to_pandas()
        file.close()
    if journal_of(path).exists():
        for kind, payload in blocks(journal_of(path)):
            if kind == ACCOUNT:
                yield dict(json.loads(payload))
            else:
                yield pa.ipc.open_stream(payload).read_all().to_pandas()


def joined(parts: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Frames as one. Where a part begins at or before a step that is there already, a resumed run has taken over."""
    kept = list(parts)
    limits = _limits([int(part["step"].iloc[0]) for part in kept if len(part)])
    kept = [part[part["step"] < limit] for part, limit in zip((p for p in kept if len(p)), limits, strict=True)]
    return pd.concat(kept, ignore_index=True) if kept else pd.DataFrame()


def _limits(firsts: Sequence[int]) -> list[float]:
    """Per part, the first step that a later part takes over."""
    later = np.minimum.accumulate([np.inf, *firsts[::-1]])[:-1][::-1]
    return [float(limit) for limit in later]


def finish(path: str | os.PathLike[str], account: Mapping[str, Any]) -> None:
    """Turn the journal into the Parquet file; whatever happens, nothing that was recorded is lost.

    Args:
        path: of the Parquet file; one that is there already is continued.
        account: becomes the ``attrs`` of the history.

    Raises:
        OSError: the file cannot be written; the journal stays and can be read.
    """
    parquet = require("pyarrow.parquet", "parquet")
    pa = require("pyarrow", "parquet")
    firsts = [int(piece["step"].iloc[0]) for piece in pieces(path) if isinstance(piece, pd.DataFrame) and len(piece)]
    frames = (piece for piece in pieces(path) if isinstance(piece, pd.DataFrame) and len(piece))
    kept = (frame[frame["step"] < limit] for frame, limit in zip(frames, _limits(firsts), strict=True))
    partial = Path(f"{os.fspath(path)}.partial")
    writer = None
    try:
        for group in _grouped(frame for frame in kept if len(frame)):
            table = pa.Table.from_pandas(with_findings(group, findings_of(account)), preserve_index=False)
            if writer is None:
                attrs = {b"PANDAS_ATTRS": json.dumps(dict(account)).encode()}
                schema = table.schema.with_metadata({**(table.schema.metadata or {}), **attrs})
                writer = parquet.ParquetWriter(partial, schema)
            writer.write_table(table.cast(writer.schema))
        if writer is not None:
            writer.close()
            os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    journal_of(path).unlink(missing_ok=True)


def _grouped(frames: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """Small frames put together to large ones."""
    waiting: list[pd.DataFrame] = []
    for frame in frames:
        waiting.append(frame)
        if sum(len(part) for part in waiting) >= _GROUP_ROWS:
            yield pd.concat(waiting, ignore_index=True)
            waiting = []
    if waiting:
        yield pd.concat(waiting, ignore_index=True)
