"""Pictures of a run, drawn from its history frame, and all of them on one page.

Layers stand in network order, the input on top. What has no place on a logarithmic axis is marked: NaN, Inf and zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from keras_gradwatch._optional import require
from keras_gradwatch.heat_maps import heat_map
from keras_gradwatch.pictures import View, headline, height_for, view_of
from keras_gradwatch.profiles import check_errors, gradient_flow
from keras_gradwatch.timelines import losses, norms, update_ratios, zero_fractions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "check_errors",
    "gradient_flow",
    "heat_map",
    "losses",
    "norms",
    "overview",
    "update_ratios",
    "zero_fractions",
]


def overview(history: pd.DataFrame | View) -> Figure:
    """One page: the verdict, the check, gradients by layer and step, and how norms, updates and loss went.

    Args:
        history: a history frame.

    Returns:
        The figure; save it with ``figure.savefig("run.png")``.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: ``history`` is not a history frame.
    """
    view = view_of(history)
    pyplot = require("matplotlib.pyplot", "plot")
    tall = max(4.6, 0.75 * height_for(max(len(view.samples.layers), len(view.account.tensors) // 2)))
    figure: Figure
    figure, places = pyplot.subplots(
        3, 2, figsize=(15, 2 * tall + 4.5), layout="constrained", height_ratios=(tall, tall, 3.7)
    )
    for draw, axes in zip(
        (heat_map, gradient_flow, check_errors, norms, losses, update_ratios), places.flat, strict=True
    ):
        draw(view, ax=axes)
    figure.suptitle(headline(view.account), x=0.01, ha="left", fontsize=14, fontweight="bold")
    if "inline" in pyplot.get_backend():
        pyplot.close(figure)  # a notebook shows the value of the cell; an open figure would be shown twice
    return figure
