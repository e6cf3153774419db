"""Histories kept in files: CSV and Parquet, read back with the dtypes and the network order they had."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TextIO, cast

import pandas as pd

from keras_gradwatch._optional import require
from keras_gradwatch.account import findings_of
from keras_gradwatch.csv_log import account_line, sections
from keras_gradwatch.journal import joined, journal_of, pieces
from keras_gradwatch.marks import with_findings
from keras_gradwatch.records import VERDICTS
from keras_gradwatch.schema import PANDAS_VERSION, ROLES, SCHEMA, categorical

_Path = str | os.PathLike[str]

_NAMES = tuple(column.name for column in SCHEMA)
_CAN_MISS = tuple(column.name for column in SCHEMA if column.dtype == "float64" or column.name == "check")
#: What a file that is not a history makes pandas, pyarrow, gzip or json raise.
_BROKEN = (ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError, OSError, EOFError, zlib.error)


def write_history(frame: pd.DataFrame, path: _Path) -> None:
    """Keep a history frame in a file that :func:`read_history` gives back whole.

    Args:
        frame: a history frame.
        path: ends in ``.csv``, ``.csv.gz`` or ``.parquet``. CSV holds ``frame.attrs`` in a first line after ``#``.

    Raises:
        ValueError: the path ends in something else.
        ModuleNotFoundError: the path ends in ``.parquet`` and pyarrow is not installed.
        OSError: the file cannot be written.
    """
    if _file_format(path) == "parquet":
        require("pyarrow", "parquet")
        frame.to_parquet(path, index=False, engine="pyarrow")
        return
    with _open_text(path, "wt") as file:
        # The line end of RFC 4180 makes the csv module quote names with a lone carriage return, too.
        file.write(account_line(cast(dict[str, Any], frame.attrs)))
        frame.to_csv(file, index=False, lineterminator="\r\n")


def read_history(path: _Path) -> pd.DataFrame:
    """A history from a file, with the dtypes and the network order it had in the run.

    Reads what :func:`write_history`, ``frame.to_csv`` or ``frame.to_parquet`` wrote, and what a ``CSVSink`` or
    ``ParquetSink`` has written so far, also when its process was killed. Nothing in the file is executed. CSV does not
    keep the categories: layers are ordered by depth, tensors as they first appear.

    Args:
        path: ends in ``.csv``, ``.csv.gz`` or ``.parquet``.

    Returns:
        The history frame; columns that are not in the schema are kept at its end. ``attrs`` are empty for a CSV file
        without our first line.

    Raises:
        ValueError: the path ends in something else, or the content is not a history.
        ModuleNotFoundError: the path ends in ``.parquet`` and pyarrow is not installed.
        OSError: the file cannot be opened.
    """
    read = _read_csv
    if _file_format(path) == "parquet":
        require("pyarrow", "parquet")
        read = _read_parquet
    with (Path(path) if Path(path).exists() or not journal_of(path).exists() else journal_of(path)).open("rb"):
        pass  # a missing or forbidden file is told in the system's own words, not as a foreign one
    try:
        return _conformed(read(path))
    except _BROKEN as error:
        raise ValueError(
            f"{os.fspath(path)!r} holds no gradient history: {error}. Expected a table with the columns "
            f"{', '.join(_NAMES)}. Write one with watch.history.to_csv(path) or watch.history.to_parquet(path)."
        ) from error


def _file_format(path: _Path) -> Literal["csv", "parquet"]:
    name = os.fspath(path).lower()
    if name.endswith(".parquet"):
        return "parquet"
    if name.endswith((".csv", ".csv.gz")):
        return "csv"
    raise ValueError(
        f"{os.fspath(path)!r} has no known ending. Expected .csv, .csv.gz or .parquet. Name the file after its format."
    )


def _open_text(path: _Path, mode: Literal["wt"]) -> TextIO:
    # newline="" leaves line ends inside quoted names alone.
    opener = gzip.open if os.fspath(path).lower().endswith(".gz") else open
    return cast(TextIO, opener(path, mode, encoding="utf-8", newline=""))


def _read_parquet(path: _Path) -> pd.DataFrame:
    if not journal_of(path).exists():
        try:
            return pd.read_parquet(path, engine="pyarrow").reset_index(drop=True)
        except require("pyarrow", "parquet").ArrowException as error:  # the bare class, for some damage, in pyarrow 15
            raise ValueError(str(error)) from error
    parts: list[pd.DataFrame] = []
    attributes: dict[str, Any] = {}
    for piece in pieces(path):
        if isinstance(piece, pd.DataFrame):
            parts.append(piece)
        else:
            attributes = piece
    return _completed(parts, attributes)


def _read_csv(path: _Path) -> pd.DataFrame:
    opener = gzip.open if os.fspath(path).lower().endswith(".gz") else open
    with opener(path, "rb") as file:
        parts = list(sections(file.read()))
    attributes = parts[-1][0]
    if len(parts) > 1 or (attributes and not parts[0][1]):
        return _completed([_csv_frame(rows) for _, rows in parts if rows], attributes)
    frame = _csv_frame(parts[0][1])
    frame.attrs.update(attributes)
    return frame


def _csv_frame(rows: bytes) -> pd.DataFrame:
    # Names come back as they are: a layer may well be called "None" or "NA". Only numbers and verdicts can be missing.
    missing = {name: ["", "NaN", "nan"] for name in _CAN_MISS}
    dtypes: Any = {column.name: "str" if column.dtype == "category" else column.dtype for column in SCHEMA}
    # Older versions are off in the last bits unless told otherwise; from 3.1 on the option is deprecated.
    exact: Any = {"float_precision": "round_trip"} if PANDAS_VERSION < (3, 1) else {}
    frame: pd.DataFrame = pd.read_csv(
        io.BytesIO(rows), dtype=dtypes, na_values=missing, keep_default_na=False,
        encoding="utf-8-sig",  # also what a spreadsheet saved
        **exact,
    )  # fmt: skip
    return frame.drop(columns="Unnamed: 0", errors="ignore")  # the index, which to_csv writes unless told otherwise


def _completed(parts: Sequence[pd.DataFrame], attributes: dict[str, Any]) -> pd.DataFrame:
    """What a sink has written so far, as one frame: rows of a resumed run once, findings as known at the end."""
    empty = {
        column.name: pd.Series([], dtype="str" if column.dtype == "category" else column.dtype) for column in SCHEMA
    }
    frame = joined(parts) if any(map(len, parts)) else pd.DataFrame(empty)
    frame = with_findings(frame, findings_of(attributes))
    frame.attrs.update(attributes)
    return frame


def _conformed(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with the columns of the schema first, in their order and dtypes."""
    absent = [name for name in _NAMES if name not in frame.columns]
    if absent:
        raise ValueError(f"it lacks the columns {', '.join(absent)}")
    frame = frame[[*_NAMES, *(name for name in frame.columns if name not in _NAMES)]]
    plain: Any = {column.name: column.dtype for column in SCHEMA if column.dtype != "category"}
    frame = frame.astype(plain)
    return frame.assign(
        layer=_recast(frame["layer"], _layers_in_order(frame)),
        tensor=_recast(frame["tensor"], _in_order(frame["tensor"])),
        role=_recast(frame["role"], ROLES),
        check=_recast(frame["check"], VERDICTS),
    )


def _in_order(names: pd.Series[Any]) -> list[str]:
    """Names in the order of their categories, or by first appearance: network order, since rows of a step are in it."""
    if isinstance(names.dtype, pd.CategoricalDtype):
        return [str(name) for name in names.cat.categories]
    return [str(name) for name in names.dropna().unique()]


def _layers_in_order(frame: pd.DataFrame) -> list[str]:
    layers = _in_order(frame["layer"])
    if isinstance(frame["layer"].dtype, pd.CategoricalDtype):
        return layers
    depths = frame.groupby("layer", sort=False)["depth"].min()
    return sorted(layers, key=lambda layer: int(depths[layer]))


def _recast(values: pd.Series[Any], categories: Sequence[str]) -> pd.Series[Any]:
    unknown = [name for name in _in_order(values) if name not in categories]
    if unknown:
        raise ValueError(f"column {values.name!r} holds {', '.join(unknown)}, and not only {', '.join(categories)}")
    return values.astype(categorical(categories))
