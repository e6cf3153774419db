"""The history with a column per tensor or layer: :func:`wide`, also as ``frame.gradwatch.wide``."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pandas as pd

from keras_gradwatch.schema import SCHEMA

_VALUES = tuple(c.name for c in SCHEMA if c.dtype in ("float64", "int64") and c.name not in ("step", "epoch", "depth"))


def wide(frame: pd.DataFrame, column: str = "grad_norm", *, by: Literal["tensor", "layer"] = "tensor") -> pd.DataFrame:
    """One quantity of a history frame over the steps, one column per tensor or layer, in network order.

    Args:
        frame: a history frame.
        column: a column of numbers, such as ``"grad_norm"``, ``"update_ratio"`` or ``"check_error"``.
        by: ``"tensor"``, or ``"layer"``: norms of its tensors together (root of the sum of squares),
            ``nonfinite_count`` and ``size`` summed, and the largest of everything else.

    Returns:
        Index ``step``, rising; NaN where nothing was measured; no columns of tensors without a single value.

    Raises:
        ValueError: the frame is no history, or the column holds no numbers.

    Example:
        >>> from keras_gradwatch.history import History
        >>> wide(History((), {}).to_frame()).shape
        (0, 0)
    """
    if "step" not in frame.columns or "tensor" not in frame.columns:
        raise ValueError(
            f"Received a frame with the columns {', '.join(map(str, frame.columns)) or 'none'}. Expected a history "
            "frame: watch.history, or what read_history gives."
        )
    if column not in _VALUES or column not in frame.columns:
        raise ValueError(f"Received column={column!r}. Expected one of {', '.join(_VALUES)}. Choose one of them.")
    if by not in ("tensor", "layer"):
        raise ValueError(f"Received by={by!r}. Expected 'tensor' or 'layer'. Choose one of them.")
    groups = frame.groupby(["step", by], observed=True, sort=True)[column]
    if by == "tensor":
        series: Any = groups.first()
    elif column.endswith("_norm"):
        series = np.sqrt(frame[column].pow(2).groupby([frame["step"], frame[by]], observed=True).sum(min_count=1))
    else:
        series = groups.sum() if column in ("nonfinite_count", "size") else groups.max()
    table: pd.DataFrame = series.unstack(by)
    ordered = [name for name in frame[by].cat.categories if name in table.columns] if len(frame) else []
    return table[ordered].dropna(axis="columns", how="all").rename_axis(columns=None)


@pd.api.extensions.register_dataframe_accessor("gradwatch")
class GradwatchAccessor:
    """``frame.gradwatch``: what can be asked of a history frame."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self._frame = frame

    def wide(self, column: str = "grad_norm", *, by: Literal["tensor", "layer"] = "tensor") -> pd.DataFrame:
        """The same as :func:`keras_gradwatch.wide.wide`."""
        return wide(self._frame, column, by=by)

    @property
    def findings(self) -> pd.DataFrame:
        """The findings of the run, one row each, as ``watch.findings``; empty for a frame that lost its ``attrs``."""
        columns = ["finding", "layer", "tensor", "first_step", "last_step", "severity", "value", "limit", "message"]
        return pd.DataFrame(self._frame.attrs.get("findings", []), columns=[*columns, "advice"])
