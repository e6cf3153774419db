"""Optional packages, imported where they are used."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """The imported module, or an error that says what to install.

    Args:
        module: dotted name, such as ``"pyarrow.parquet"``.
        extra: the extra of this package that brings it, such as ``"parquet"``.

    Returns:
        The module.

    Raises:
        ModuleNotFoundError: if the module, or the package it lives in, is not installed. An installed package that
            fails to import something else keeps its own error, since installing the extra would not help.

    Example:
        >>> require("json", "report").dumps([1])
        '[1]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ModuleNotFoundError(
            f"Could not import {module!r}: {error.name!r} is not installed. It belongs to the extra {extra!r} of "
            f'keras-gradwatch. Install it with: pip install "keras-gradwatch[{extra}]"',
            name=error.name,
        ) from error
