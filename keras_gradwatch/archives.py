"""Nested data in plain files: arrays in ``.npz`` without pickles, everything else in JSON."""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_Path = str | os.PathLike[str]
_NUMBERS = "biufc"


def pack(tree: Any, arrays: dict[str, npt.NDArray[Any]], *, name: str) -> Any:
    """Nested dicts, lists and tuples of arrays as a JSON-able description; the arrays go into ``arrays``.

    Args:
        tree: leaves are arrays of numbers, or ``None``; keys are strings.
        arrays: is filled, under names that begin with ``name``.
        name: of this tree.

    Raises:
        TypeError: a leaf is no array of numbers, or a key is no string.
    """
    if tree is None:
        return None
    if isinstance(tree, dict):
        if not all(isinstance(key, str) for key in tree):
            raise TypeError(f"Received a dict with the keys {list(tree)[:5]}. Expected strings. Name the data.")
        return {"dict": {key: pack(part, arrays, name=f"{name}/{key}") for key, part in tree.items()}}
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [pack(part, arrays, name=f"{name}/{place}") for place, part in enumerate(tree)]}
    array, dtype = np.asarray(tree), str(np.asarray(tree).dtype)
    if dtype == "bfloat16":  # NumPy would write it as raw bytes; every bfloat16 number is a float32 number, too
        array = array.astype(np.float32)
    if array.dtype.kind not in _NUMBERS:
        raise TypeError(f"Received an array of dtype {dtype}. Expected numbers: other arrays need pickles.")
    arrays[name] = array
    return {"array": name, "dtype": dtype}


def unpack(description: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> Any:
    """What :func:`pack` was given; a bfloat16 array comes as float32.

    Raises:
        ValueError: the description is not ours, or an array is missing.
    """
    if description is None:
        return None
    kind, content = next(iter(description.items())) if isinstance(description, dict) and description else ("", None)
    if kind == "dict" and isinstance(content, dict):
        return {key: unpack(part, arrays) for key, part in content.items()}
    if kind in ("list", "tuple") and isinstance(content, list):
        parts = [unpack(part, arrays) for part in content]
        return parts if kind == "list" else tuple(parts)
    if kind == "array" and isinstance(content, str) and content in arrays:
        return arrays[content]
    raise ValueError(f"Received {str(description)[:80]!r} where data are described. Expected an array that is there.")


def write_arrays(path: _Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write arrays of numbers to an ``.npz`` file."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)


def read_arrays(path: _Path, *, most_bytes: int) -> dict[str, npt.NDArray[Any]]:
    """Arrays of numbers from an ``.npz`` file; nothing in it is executed.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is no such file, or holds more than ``most_bytes``.
    """
    with Path(path).open("rb"):
        pass
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > most_bytes:
            raise ValueError(f"it holds {size:,} bytes, more than {most_bytes:,}")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, NotImplementedError, MemoryError) as error:
        raise ValueError(f"{os.fspath(path)!r} holds no arrays: {error}. Expected an .npz file.") from error


def write_json(path: _Path, content: Any) -> None:
    """Write JSON; NaN and Inf, which it does not know, become words."""
    Path(path).write_text(json.dumps(_worded(content), indent=1, allow_nan=False), encoding="utf-8")


def read_json(path: _Path) -> Any:
    """Read JSON.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is no JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)!r} holds no JSON: {error}.") from error


def _worded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _worded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_worded(part) for part in value]
    if isinstance(value, np.generic):
        return _worded(value.item())
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
