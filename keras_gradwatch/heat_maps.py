"""The picture of layer × step: where and when it went wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from keras_gradwatch._optional import require
from keras_gradwatch.pictures import (
    ALARM,
    GREY,
    View,
    axes_or_new,
    empty,
    height_for,
    log_range,
    name_of,
    name_rows,
    time_axis,
    view_of,
    write_decades,
)
from keras_gradwatch.records import Finding, Float64Array, Int64Array
from keras_gradwatch.samples import Quantity, binned_extremes, bins, quantity_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_COLUMNS = 400
_MOST_LABELS = 12


def heat_map(history: pd.DataFrame | View, *, quantity: Quantity = "rms", ax: Axes | None = None) -> Axes:
    """One number for each layer and step as colour, findings framed: where and when it went wrong.

    Args:
        history: a history frame.
        quantity: ``"rms"`` or ``"norm"`` of the gradient, ``"update_ratio"`` or ``"zero_fraction"``.
        ax: where to draw; a new figure by default.

    Returns:
        The axes. Neighbouring steps share a column where there are more than 400, which shows the largest value.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: ``history`` is not a history frame, or ``quantity`` is none of the above.
    """
    label = quantity_name(quantity)
    view = view_of(history)
    samples, tracked = view.samples, view.samples.tracked
    axes = axes_or_new(ax, height=height_for(len(samples.layers)) + 0.7)
    axes.set_title(f"{label.capitalize()} by layer and step", loc="left")
    if not tracked.any():
        return empty(axes, "no gradient was tracked")
    steps = samples.steps[tracked]
    starts = bins(len(steps), _MOST_COLUMNS)
    cells = binned_extremes(samples.by_layer(quantity)[tracked], starts).T
    broken = binned_extremes(samples.nonfinite[tracked].astype(np.float64), starts).T > 0
    _draw_cells(axes, _edges(steps, starts), cells, label=label, linear=quantity == "zero_fraction")
    _cover(axes, _edges(steps, starts), broken, ALARM)
    name_rows(axes, samples.layers, always=view.culprits())
    limits = axes.get_xlim()
    time_axis(axes, steps)
    axes.set_xlim(*limits)
    _frame_findings(axes, view)
    _explain(axes, zero=quantity != "zero_fraction" and bool((cells == 0).any()), cells=cells, broken=broken)
    return axes


def _draw_cells(axes: Axes, edges: Float64Array, cells: Float64Array, *, label: str, linear: bool) -> None:
    colours = require("matplotlib.colors", "plot")
    low, high = (0.0, 1.0) if linear else log_range(cells)
    norm = colours.Normalize(low, high) if linear else colours.LogNorm(low, high, clip=True)
    shown = np.ma.masked_where(np.isnan(cells) | ((cells == 0) & (not linear)), cells)
    # Rasterised: as vectors, a map of 300 layers would take megabytes.
    mesh = axes.pcolormesh(edges, np.arange(len(cells) + 1) - 0.5, shown, norm=norm, cmap="viridis", rasterized=True)
    figure = axes.get_figure()
    if figure is not None and shown.count():
        bar = figure.colorbar(mesh, ax=axes, location="bottom", aspect=60, pad=0.02, fraction=0.05, label=label)
        if not linear:
            write_decades(bar.ax.xaxis, few=False)
    if not linear:
        _cover(axes, edges, cells == 0, "black")


def _cover(axes: Axes, edges: Float64Array, mask: npt.NDArray[np.bool_], colour: str) -> None:
    """One flat colour over the cells where the mask is True."""
    if mask.any():
        flat = np.ma.masked_where(~mask, np.ones(mask.shape))
        only = require("matplotlib.colors", "plot").ListedColormap([colour])
        axes.pcolormesh(edges, np.arange(len(mask) + 1) - 0.5, flat, cmap=only, rasterized=True)


def _frame_findings(axes: Axes, view: View) -> None:
    """A frame around the steps and layers of each finding, its name at the right of the layer at fault."""
    named: dict[int, list[str]] = {}
    for finding in view.account.findings:
        rows = view.layers_of(finding)
        for run in _runs(rows):
            _draw_frame(axes, view, finding, run)
        culprits = view.culprit_of(finding)
        if culprits:
            named.setdefault(culprits[0], []).append(finding.finding)
        elif rows.size:  # the loss, the data, or a layer without weights is at fault
            named.setdefault(int(rows[len(rows) // 2]), []).append(f"{finding.finding} ({finding.layer})")
    for row, names in sorted(named.items())[:_MOST_LABELS]:
        text = f"◂ {name_of(', '.join(dict.fromkeys(names)))}"
        place: Any = axes.get_yaxis_transform()
        axes.text(1.008, row, text, transform=place, va="center", ha="left", fontsize=8.5, fontweight="bold")


def _draw_frame(axes: Axes, view: View, finding: Finding, rows: tuple[int, int]) -> None:
    rectangle = require("matplotlib.patches", "plot").Rectangle
    left, right = axes.get_xlim()
    start, end = finding.first_step - 0.5, right if view.account.goes_on(finding) else finding.last_step + 0.5
    # Wide enough that the frame of a single step does not hide it.
    spare = max(0.0, (right - left) / 80 - (end - start)) / 2
    start, end = max(start - spare, left), min(end + spare, right)
    for colour, width in (("black", 3.2), ("white", 1.4)):  # seen on every colour of the map
        corner, height = (start, rows[0] - 0.5), rows[1] - rows[0] + 1
        axes.add_patch(rectangle(corner, end - start, height, fill=False, edgecolor=colour, linewidth=width))


def _explain(axes: Axes, *, zero: bool, cells: Float64Array, broken: npt.NDArray[np.bool_]) -> None:
    """What the colours outside of the scale mean, where there are any."""
    patch = require("matplotlib.patches", "plot").Patch
    kinds = [patch(color=ALARM, label="NaN or Inf")] if broken.any() else []
    kinds += [patch(color="black", label="exactly zero")] if zero else []
    kinds += [patch(facecolor="none", edgecolor=GREY, label="no gradient")] if (np.isnan(cells) & ~broken).any() else []
    if kinds:
        axes.legend(
            handles=kinds, fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(kinds), frameon=False
        )


def _runs(rows: Int64Array) -> list[tuple[int, int]]:
    """Neighbouring rows as (first, last)."""
    groups = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1) if rows.size else []
    return [(int(group[0]), int(group[-1])) for group in groups]


def _edges(steps: Int64Array, starts: npt.NDArray[np.intp]) -> Float64Array:
    """Edges of bins of steps, half-way between samples, shape ``[B + 1]``."""
    last = steps[-1] + (0.5 if steps.size < 2 else (steps[-1] - steps[-2]) / 2)
    left = np.r_[steps[0] - 0.5, (steps[1:] + steps[:-1]) / 2]
    return np.asarray(np.r_[left[starts], last], np.float64)
