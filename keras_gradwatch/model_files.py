"""A saved model and a file of data, loaded without running anything that is in them."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

#: Arrays that a data file may hold, in bytes. A gradient check needs a handful of samples.
MOST_BYTES = 4 * 1024**3

_NAMES = ("x", "y", "sample_weight")


class Data(NamedTuple):
    """What a data file holds."""

    x: Any
    y: Any = None
    sample_weight: Any = None


def load_model(path: str | os.PathLike[str]) -> Any:
    """A compiled model from a ``.keras`` file.

    Args:
        path: of a ``.keras`` file. Whatever in it would run code, such as a lambda, is refused.

    Returns:
        The model.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it holds no model, one that could only be loaded by running code, or one without a loss.
    """
    with Path(path).open("rb"):
        pass  # a missing or forbidden file is told in the system's own words
    try:
        model = keras.saving.load_model(path, safe_mode=True)
    except Exception as error:
        raise ValueError(
            f"Could not load {os.fspath(path)!r}: {type(error).__name__}: {str(error).strip()[:600]}. Expected a model "
            "saved with model.save('model.keras') that loads without running code from the file. Custom layers need "
            "--import MODULE, a module of yours that registers them."
        ) from error
    if getattr(model, "loss", None) is None:
        raise ValueError(
            f"{os.fspath(path)!r} holds a model that was not compiled with a loss. Expected one, since gradients are "
            "checked against its slope. Call model.compile(loss=...) before model.save."
        )
    return model


def load_data(path: str | os.PathLike[str]) -> Data:
    """Arrays from an ``.npz`` file.

    Args:
        path: of a file with the arrays ``x``, ``y`` and, if wanted, ``sample_weight``. Several inputs or outputs are
            told apart by name: ``x/image``, ``x/text``. Pickled objects are refused.

    Returns:
        The arrays; a dictionary of them where they have names.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is no such file, holds other arrays, or more than 4 GiB.
    """
    file = os.fspath(path)
    with Path(path).open("rb"):
        pass
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > MOST_BYTES:
            raise ValueError(f"it holds {size:,} bytes, more than {MOST_BYTES:,}")
        with np.load(path, allow_pickle=False) as arrays:
            groups = _grouped({name: arrays[name] for name in arrays.files})
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, NotImplementedError, MemoryError) as error:
        raise ValueError(
            f"{file!r} holds no data for a check: {error}. Expected an .npz file with the arrays x, y and, if wanted, "
            "sample_weight. Write one with numpy.savez('sample.npz', x=x[:8], y=y[:8])."
        ) from error
    return Data(**groups)


def _grouped(arrays: Mapping[str, Any]) -> dict[str, Any]:
    groups: dict[str, Any] = {}
    for name, array in arrays.items():
        group, _, own = name.partition("/")
        if group not in _NAMES:
            raise ValueError(f"it has an array {name!r}, and not only {', '.join(_NAMES)}")
        if own:
            groups.setdefault(group, {})[own] = array
        else:
            groups[group] = array
    if "x" not in groups:
        raise ValueError("it has no array 'x'")
    return groups
