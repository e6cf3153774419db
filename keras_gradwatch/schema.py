"""The columns of the history frame: the one place where they are named, typed and explained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

SCHEMA_VERSION = 1

#: Major and minor version, for the few places where pandas 2 and 3 differ.
PANDAS_VERSION = tuple(int(part) for part in pd.__version__.split(".")[:2])

#: Categories of the ``role`` column.
ROLES = ("weight", "input")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the history frame.

    Attributes:
        name: column name.
        dtype: what pandas holds it in.
        meaning: what it holds, in Markdown.
    """

    name: str
    dtype: Literal["int64", "float64", "category", "str"]
    meaning: str


#: The history frame, column by column. The documentation is rendered from this constant.
SCHEMA = (
    Column("step", "int64", "optimizer steps done, from 1"),
    Column("epoch", "int64", "from 0, as in Keras"),
    Column("layer", "category", "layer path; categories in network order"),
    Column("tensor", "category", "`variable.path`, or the input's name; categories in network order"),
    Column("role", "category", "`weight` or `input`"),
    Column("depth", "int64", "0 = nearest the input"),
    Column("size", "int64", "number of elements"),
    Column("loss", "float64", "this batch's own loss (`logs['loss']` is a running mean); missing when not observed"),
    Column("grad_norm", "float64", "norm of the real gradient of this step: unscaled, before clipping"),
    Column("grad_rms", "float64", "root mean square of that gradient's elements"),
    Column("grad_absmax", "float64", "largest absolute value in that gradient"),
    Column("zero_fraction", "float64", "share of exact zeros in that gradient, 0–1"),
    Column("nonfinite_count", "int64", "NaN or Inf elements in that gradient; 0 when not tracked"),
    Column("weight_norm", "float64", "norm of the weight"),
    Column("update_ratio", "float64", "‖applied update‖ / ‖weight‖"),
    Column("check", "category", "verdict of the gradient check; missing when not checked at this step"),
    Column("check_error", "float64", "error of the gradient, relative to its norm, in float64: is the formula right?"),
    Column("check_bar", "float64", "error bar of `check_error`: the smallest error this check could have seen"),
    Column(
        "rounding_error",
        "float64",
        "‖training-dtype gradient − float64 gradient‖ / ‖float64 gradient‖: is the arithmetic good enough?",
    ),
    Column("findings", "str", "findings active for this row, comma-joined, empty when healthy"),
)


def schema_markdown() -> str:
    """The columns as a Markdown table, for the documentation.

    Returns:
        One line per column under a heading line; no newline at the end.
    """
    rows = [f"| `{column.name}` | {column.dtype} | {column.meaning} |" for column in SCHEMA]
    return "\n".join(["| column | dtype | meaning |", "|---|---|---|", *rows])


def categorical(names: Iterable[str]) -> pd.CategoricalDtype:
    """A dtype whose categories are strings in the given order, also when there are none."""
    index: Any = pd.Index(list(names), dtype="str")
    return pd.CategoricalDtype(index)
