"""Pictures over time: how strong gradients are, how fast weights move, how the loss goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from keras_gradwatch.pictures import (
    ALARM,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    View,
    axes_or_new,
    empty,
    legend,
    light_grid,
    log_axis,
    log_range,
    mark_steps,
    name_of,
    say,
    time_axis,
    view_of,
)
from keras_gradwatch.records import Float64Array, Int64Array
from keras_gradwatch.samples import (
    Quantity,
    binned_averages,
    binned_extremes,
    binned_means,
    bins,
    quantity_name,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Update ratios that usually mean healthy learning: around 1e-3 (Karpathy 2015, CS231n, "ratio of weights:updates").
HEALTHY_UPDATES = (1e-4, 1e-2)

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, "#7F6000", "#000000", GREY)
_MOST_POINTS = 240
_MOST_COLOURED = 6
_MOST_GREY = 24


def norms(history: pd.DataFrame | View, *, ax: Axes | None = None) -> Axes:
    """Gradient norm of each layer over time, and of all together.

    Args:
        history: a history frame.
        ax: where to draw; a new figure by default.

    Returns:
        The axes. Where there are more than six layers, those with findings, the weakest and the strongest have a colour
        and a name; others are grey lines, or a grey range if they are many.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: ``history`` is not a history frame.
    """
    view = view_of(history)
    axes = _lines(view, "norm", ax)
    axes.set_title("Gradient norm: does it explode or fade?", loc="left")
    return axes


def update_ratios(history: pd.DataFrame | View, *, ax: Axes | None = None) -> Axes:
    """By how much of its own size each layer moves per step; the band is where healthy training usually is.

    Args:
        history: a history frame.
        ax: where to draw; a new figure by default.

    Returns:
        The axes, with lines as in :func:`norms`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: ``history`` is not a history frame.
    """
    view = view_of(history)
    axes = _lines(view, "update_ratio", ax)
    axes.set_title("Update per step: do the weights move?", loc="left")
    if axes.get_yscale() == "log":
        low, high = axes.get_ylim()
        axes.axhspan(*HEALTHY_UPDATES, color=GREEN, alpha=0.13, linewidth=0)
        log_axis(axes, "y", min(low, HEALTHY_UPDATES[0] / 2), max(high, HEALTHY_UPDATES[1] * 2))
        axes.set_ylabel("‖update‖ / ‖weight‖   (shaded: usual)")
    return axes


def zero_fractions(history: pd.DataFrame | View, *, ax: Axes | None = None) -> Axes:
    """Share of exact zeros in each layer's gradient over time: dead units, or rows of an embedding not in the batch.

    Args:
        history: a history frame.
        ax: where to draw; a new figure by default.

    Returns:
        The axes, with lines as in :func:`norms`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: ``history`` is not a history frame.
    """
    axes = _lines(view_of(history), "zero_fraction", ax)
    axes.set_title("Zeros in the gradient: are units dead?", loc="left")
    return axes


def losses(history: pd.DataFrame | View, *, ax: Axes | None = None) -> Axes:
    """Each batch's own loss over time; steps at which it was NaN or infinite are marked.

    Args:
        history: a history frame.
        ax: where to draw; a new figure by default.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: ``history`` is not a history frame.
    """
    samples = view_of(history).samples
    axes = axes_or_new(ax)
    axes.set_title("Loss of each batch: does it fall?", loc="left")
    finite = np.isfinite(samples.losses)
    broken = np.asarray(~finite & samples.nonfinite.any(axis=1), np.bool_)
    if not (finite | broken).any():
        return empty(axes, "no loss was observed")
    starts = bins(len(samples.steps), 2 * _MOST_POINTS)
    means = binned_averages(np.where(finite, samples.losses, np.nan)[:, None], starts)[:, 0]
    if not finite.any():
        say(axes, "the loss was never finite")
    axes.plot(samples.steps[starts], means, color=BLUE, linewidth=1.3, marker=_marker(len(starts)), markersize=4)
    time_axis(axes, samples.steps)
    marked = binned_extremes(broken[:, None].astype(np.float64), starts)[:, 0] > 0
    mark_steps(axes, samples.steps[starts][marked], label="NaN or Inf", colour=ALARM, top=True)
    axes.set_ylabel("loss")
    light_grid(axes)
    legend(axes)
    return axes


def _lines(view: View, quantity: Quantity, ax: Axes | None) -> Axes:
    """A line per layer, the telling ones in colour, and marks at steps that broke."""
    samples, tracked = view.samples, view.samples.tracked
    axes = axes_or_new(ax)
    if not tracked.any():
        return empty(axes, "no gradient was tracked")
    starts = bins(int(tracked.sum()), _MOST_POINTS)
    steps = samples.steps[tracked][starts]
    linear = quantity == "zero_fraction"
    average = binned_averages if linear else binned_means
    values = average(samples.by_layer(quantity)[tracked], starts)
    together = average(samples.global_norms[tracked][:, None], starts)[:, 0] if quantity == "norm" else None
    low, high = (0.0, 1.0) if linear else log_range(values if together is None else np.c_[values, together])
    shown = values if linear else np.where(values > 0, values, np.nan)
    coloured = _telling(view, values)
    _draw_others(axes, steps, np.delete(shown, coloured, axis=1))
    for place, colour in zip(coloured, _COLOURS, strict=False):
        if np.isnan(shown[:, place]).all():
            continue
        label = name_of(samples.layers[place])
        axes.plot(steps, shown[:, place], color=colour, linewidth=1.3, label=label, **_dots(len(steps)))
    if together is not None and (together > 0).any():
        ink = axes.xaxis.label.get_color()
        axes.plot(steps, together, color=ink, linewidth=2.0, label="all together", **_dots(len(steps)))
    if np.isnan(shown).all():
        say(axes, "no step has a value that could be drawn")
    if linear:
        axes.set_ylim(low, high)
    else:
        log_axis(axes, "y", low, high)
    time_axis(axes, samples.steps)
    broken = binned_extremes(samples.nonfinite[tracked].astype(np.float64), starts).max(axis=1, initial=0.0) > 0
    mark_steps(axes, steps[broken], label="NaN or Inf", colour=ALARM, top=True)
    if not linear:
        still = np.asarray((values == 0).any(axis=1), np.bool_)
        mark_steps(axes, steps[still], label="a layer at zero", colour=GREY, top=False)
    axes.set_ylabel(quantity_name(quantity))
    light_grid(axes)
    legend(axes, place="right")
    return axes


def _telling(view: View, values: Float64Array) -> list[int]:
    """Layers to show in colour, all if they are few, else those at fault, the weakest, the strongest."""
    count = values.shape[1]
    if count <= _MOST_COLOURED:
        return list(range(count))
    chosen = view.culprits()[: _MOST_COLOURED - 2]
    level = np.nan_to_num(binned_averages(np.log10(np.where(values > 0, values, np.nan)), np.zeros(1, np.intp))[0])
    for place in (int(np.argmin(level)), int(np.argmax(level))):
        chosen += [place] if place not in chosen else []
    return sorted(chosen)


def _draw_others(axes: Axes, steps: Int64Array, values: Float64Array) -> None:
    count = values.shape[1]
    if not count:
        return
    label = f"{count} other layer{'s' if count > 1 else ''}"
    if count <= _MOST_GREY:
        lines = axes.plot(steps, values, color=GREY, alpha=0.45, linewidth=0.8)
        lines[0].set_label(label)
        return
    # Unlike nanmin and nanmax, these do not warn of a step without any value.
    low, high = np.fmin.reduce(values, axis=1), np.fmax.reduce(values, axis=1)
    axes.fill_between(steps, low, high, color=GREY, alpha=0.3, linewidth=0, label=label)


def _dots(count: int) -> dict[str, Any]:
    return {"marker": _marker(count), "markersize": 4}


def _marker(count: int) -> str:
    return "o" if count <= 20 else ""  # a single step has no line
