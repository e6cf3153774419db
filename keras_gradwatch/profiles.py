"""Pictures along the depth of a model: where the gradient fades, and which gradients are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from keras_gradwatch.account import Account, worst_checks
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
    height_for,
    legend,
    light_grid,
    log_axis,
    log_range,
    mark_rows,
    name_of,
    name_rows,
    say,
    view_of,
)
from keras_gradwatch.records import Float64Array, TensorInfo
from keras_gradwatch.samples import medians

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: A layer further than this from those nearest the loss is faded or exploding: ``Vanishing.ratio`` and
#: ``Exploding.depth_ratio``.
BAND = 1e2

#: Colour, marker and size of a verdict, the alarming ones larger; all others are small and grey.
_STYLES = {
    "mismatch": (ALARM, "X", 60),
    "nonfinite": (ALARM, "*", 80),
    "imprecise": (ORANGE, "D", 34),
    "inconclusive": (PURPLE, "s", 24),
    "ok": (BLUE, "o", 24),
}
_ALARMING = ("mismatch", "nonfinite", "imprecise")
#: Verdicts whose names alone could be taken for faults.
_LEGEND = {name: f"{name}: no fault" for name in ("kink", "zero", "declared")}
_MOST_FAULTS = 12


def gradient_flow(history: pd.DataFrame | View, *, ax: Axes | None = None) -> Axes:
    """How strong the gradient is in each layer, at the first, the median and the last step: does it reach the input?

    Args:
        history: a history frame.
        ax: where to draw; a new figure by default.

    Returns:
        The axes. The shaded band is within a factor 100 of the third of the layers nearest the loss.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: ``history`` is not a history frame.
    """
    view = view_of(history)
    samples, tracked = view.samples, view.samples.tracked
    axes = axes_or_new(ax, height=height_for(len(samples.layers)))
    axes.set_title("Gradient flow: does it reach the input?", loc="left")
    if not tracked.any():
        return empty(axes, "no gradient was tracked")
    steps, rms = samples.steps[tracked], samples.rms[tracked]
    middle = medians(rms)
    low, high = log_range(np.stack([rms[0], middle, rms[-1]]))
    nearest = middle[-max(1, len(middle) // 3) :]
    strongest = float(np.nanmax(nearest, initial=0.0))
    if strongest > 0:
        axes.axvspan(strongest / BAND, strongest * BAND, color=GREEN, alpha=0.13, linewidth=0)
        low, high = min(low, strongest / BAND / 3), max(high, strongest * 3)
    _draw_profile(
        axes, middle, f"median of {len(steps):,} steps" if len(steps) > 1 else "the only step", (BLUE, "s", "-")
    )
    if len(steps) > 1:
        _draw_profile(axes, rms[0], f"first step ({steps[0]:,})", (SKY, "o", ":"))
        _draw_profile(axes, rms[-1], f"last step ({steps[-1]:,})", (PURPLE, "D", "--"))
    log_axis(axes, "x", low, high)
    mark_rows(axes, np.flatnonzero(middle == 0), label="zero", colour=GREY, right=False)
    broken = samples.nonfinite[tracked].any(axis=0)
    mark_rows(axes, np.flatnonzero(broken), label="NaN or Inf at some step", colour=ALARM, right=True)
    mark_rows(axes, np.flatnonzero(np.isnan(middle) & ~broken), label="no gradient", colour=ORANGE, right=False)
    name_rows(axes, samples.layers, always=view.culprits())
    axes.set_xlabel(f"gradient rms   (shaded: within {BAND:.0f} × of the layers nearest the loss)")
    axes.set_ylabel("loss  →  gradient  →  input")
    light_grid(axes)
    legend(axes)
    return axes


def check_errors(history: pd.DataFrame | View, *, ax: Axes | None = None) -> Axes:
    """Error of each tensor's gradient against its error bar: a mark beyond the grey line is a wrong formula.

    Args:
        history: a history frame.
        ax: where to draw; a new figure by default.

    Returns:
        The axes. Each tensor shows its worst check: the most alarming verdict, then the largest error. A mark at the
        left edge stands for an error of zero or one that was not measured, at the right edge for NaN or Inf. The layer
        at fault is named on the right: what it spoils lies before it, and its own weights may well be right.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: ``history`` is not a history frame.
    """
    account = view_of(history).account
    rows = worst_checks(account)
    axes = axes_or_new(ax, height=height_for(len(rows)))
    axes.set_title("Gradient check: is each formula right?", loc="left")
    if not rows:
        return empty(axes, "no gradient check was made")
    errors, limits = (np.array([getattr(check, name) for _, check in rows]) for name in ("error", "bar"))
    low, high = log_range(np.r_[errors, limits])
    width = float(np.clip(220 / len(rows), 0.8, 6.0))
    axes.hlines(np.arange(len(rows)), low, np.nan_to_num(limits, nan=low), color=GREY, alpha=0.45, linewidth=width)
    for verdict in dict.fromkeys(check.verdict for _, check in rows):
        places = [row for row, (_, check) in enumerate(rows) if check.verdict == verdict]
        colour, marker, size = _STYLES.get(verdict, (GREY, "o", 16))
        area = size if verdict in _ALARMING or len(rows) < 60 else size / 3
        shown = np.clip(np.nan_to_num(errors[places], nan=high if verdict == "nonfinite" else low), low, high)
        axes.scatter(
            shown, places, s=area, c=colour, marker=marker, label=f"{_LEGEND.get(verdict, verdict)} ({len(places)})",
            linewidths=0, zorder=3, clip_on=False,
        )  # fmt: skip
    if np.isnan(errors).all():
        say(axes, "no tensor has an error that could be measured")
    log_axis(axes, "x", low, high)
    alarming = [row for row, (_, check) in enumerate(rows) if check.verdict in _ALARMING]
    name_rows(axes, [_short_name(info) for info, _ in rows], always=alarming)
    axes.set_xlabel("relative error   (grey line: error bar, within which no difference can be seen)")
    light_grid(axes)
    legend(axes, place="above")
    _name_faults(axes, account, [info for info, _ in rows])
    return axes


def _name_faults(axes: Axes, account: Account, tensors: Sequence[TensorInfo]) -> None:
    """The layers with a wrong backward pass, each at its first weight, or just after what it spoils if it has none."""
    faults = [finding for finding in account.findings if finding.finding == "mismatch"]
    for finding in faults[:_MOST_FAULTS]:
        own = [row for row, info in enumerate(tensors) if info.layer == finding.layer]
        spoiled = [row for row, info in enumerate(tensors) if info.tensor in finding.tensors]
        if own or spoiled:
            text, row = f"◂ fault in {name_of(finding.layer)}", own[0] if own else spoiled[-1] + 0.5
            place = axes.get_yaxis_transform()
            axes.text(1.008, row, text, transform=place, va="center", ha="left", fontsize=8.5, fontweight="bold")


def _draw_profile(axes: Axes, values: Float64Array, label: str, style: tuple[str, str, str]) -> None:
    colour, marker, line = style
    size = 5.0 if len(values) <= 40 else 1.5
    shown = np.where(values > 0, values, np.nan)
    if np.isnan(shown).all():
        return
    axes.plot(
        shown, np.arange(len(values)), line, marker=marker, markersize=size, color=colour, label=label, linewidth=1.3
    )


def _short_name(info: TensorInfo) -> str:
    """Layer and variable, without the model's name that every path begins with."""
    if info.role == "input":
        return info.tensor if "input" in info.tensor else f"input {info.tensor}"
    own = info.tensor.rpartition("/")[2]
    return f"{info.layer}/{own}" if own else info.tensor
