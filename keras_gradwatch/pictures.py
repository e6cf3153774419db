"""What all pictures share: what they show of a run, colours, names along an axis, marks for what has no number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from keras_gradwatch._optional import require
from keras_gradwatch.account import Account, account_of
from keras_gradwatch.records import Finding, Float64Array, Int64Array
from keras_gradwatch.samples import Samples, samples_of
from keras_gradwatch.words import number, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: After Okabe and Ito (2008), told apart by every kind of colour vision; the blue is lighter, to be seen on dark pages.
#: Vermilion is kept for what is wrong.
BLUE, SKY, GREEN, ORANGE, PURPLE = "#0F7DC2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7"
ALARM, GREY = "#D55E00", "#8A8A8A"

_NAMES_PER_INCH = 4.5
_NAME_WIDTH = 28


@dataclass(frozen=True)  # no slots: what is derived is kept
class View:
    """A history frame and what pictures need of it, each derived once.

    Attributes:
        frame: the history frame.
    """

    frame: pd.DataFrame

    @cached_property
    def samples(self) -> Samples:
        """Statistics by step and layer."""
        return samples_of(self.frame)

    @cached_property
    def account(self) -> Account:
        """Tensors, findings and checks."""
        return account_of(self.frame)

    def layers_of(self, finding: Finding) -> Int64Array:
        """Indices of the layers that a finding is about, in network order."""
        owners = dict(zip(self.samples.tensors, self.samples.owners.tolist(), strict=True))
        marked = {owners[name] for name in finding.tensors if name in owners}
        return np.array(sorted(marked | set(self.culprit_of(finding))), np.int64)

    def culprit_of(self, finding: Finding) -> list[int]:
        """Index of the layer at fault; nothing where it owns no weight, such as the data."""
        return [place for place, layer in enumerate(self.samples.layers) if layer == finding.layer]

    def culprits(self) -> list[int]:
        """Indices of the layers at fault in any finding."""
        return sorted({place for finding in self.account.findings for place in self.culprit_of(finding)})


def view_of(history: pd.DataFrame | View) -> View:
    """The view itself, or one of a frame."""
    return history if isinstance(history, View) else View(history)


def axes_or_new(axes: Axes | None, *, height: float = 4.0) -> Axes:
    """The axes given, or those of a new figure, ``height`` in inches."""
    if axes is not None:
        return axes
    new: Axes = require("matplotlib.pyplot", "plot").subplots(figsize=(9.0, height), layout="constrained")[1]
    return new


def height_for(rows: int) -> float:
    """Inches that so many named rows need, within reason."""
    return float(np.clip(1.8 + rows / _NAMES_PER_INCH, 3.5, 9.0))


def name_of(text: str, width: int = _NAME_WIDTH) -> str:
    """A name as matplotlib prints it: short, on one line, never taken for mathematics or a hidden label."""
    name = short(text, width).replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name


def name_rows(axes: Axes, names: Sequence[str], *, always: Iterable[int] = ()) -> None:
    """Names down the y axis, the first one on top; of many only some, and those that must not be missing.

    Args:
        axes: where row ``i`` is drawn at ``y = i``.
        names: one per row.
        always: rows to name in any case; their neighbours give way.
    """
    room = axes.get_window_extent().height / axes.figure.dpi
    most = max(6, int(_NAMES_PER_INCH * room))
    step = max(1, math.ceil(len(names) / most))
    pinned = list[int]()
    for row in sorted(set(always)):
        if not pinned or row - pinned[-1] >= step:
            pinned.append(row)
    regular = [row for row in range(0, len(names), step) if all(abs(row - other) >= step for other in pinned)]
    rows = sorted([*pinned, *regular])
    axes.set_yticks(rows, [name_of(names[row]) for row in rows], fontsize=8)
    axes.tick_params(axis="y", length=0 if step == 1 else 2)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)


def log_range(values: Float64Array, *, decades: float = 20.0) -> tuple[float, float]:
    """Limits of a log axis that hold the positive finite values: one decade at least, ``decades`` at most."""
    positive = values[np.isfinite(values) & (values > 0)]
    if not positive.size:
        return 1e-1, 1e1
    high = float(np.log10(positive.max()))
    low = max(float(np.log10(positive.min())), high - decades)
    margin = max(0.5 - 0.5 * (high - low), 0.05 * (high - low))
    return float(10 ** max(low - margin, -307.0)), float(10 ** min(high + margin, 307.0))


def log_axis(axes: Axes, which: Literal["x", "y"], low: float, high: float) -> None:
    """A logarithmic axis between these limits, with a tick per decade, or fewer where there are many."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    if which == "x":
        axes.set_xscale("log")
        axes.set_xlim(low, high)
    else:
        axes.set_yscale("log")
        axes.set_ylim(low, high)
    write_decades(axis, few=math.log10(high / low) < 3 if high / low < math.inf else False)


def write_decades(axis: Any, *, few: bool) -> None:
    """Tick labels such as 10⁻³, as plain text: matplotlib's own are set as mathematics, which takes seconds a page."""
    ticker = require("matplotlib.ticker", "plot")
    axis.set_major_locator(ticker.LogLocator(numticks=10))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: decade(value)))
    axis.set_minor_locator(ticker.LogLocator(subs=range(2, 10), numticks=40) if few else ticker.NullLocator())
    axis.set_minor_formatter(ticker.NullFormatter())


def decade(value: float) -> str:
    """A power of ten as text.

    Example:
        >>> decade(0.001), decade(1.0), decade(1e12)
        ('10⁻³', '1', '10¹²')
    """
    exponent = round(math.log10(value)) if value > 0 else 0
    if exponent in (0, 1):
        return str(10**exponent)
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def mark_steps(axes: Axes, steps: Any, *, label: str, colour: str, top: bool) -> None:
    """Arrowheads along the upper or lower edge at steps whose value has no place on the axis."""
    if not len(steps):
        return
    height = np.full(len(steps), 0.97 if top else 0.03)
    marker = "v" if top else "^"
    axes.plot(
        steps, height, marker, color=colour, markersize=5, label=label, transform=axes.get_xaxis_transform(), zorder=4
    )


def mark_rows(axes: Axes, rows: Any, *, label: str, colour: str, right: bool) -> None:
    """Arrowheads along the right or left edge at rows whose value has no place on the axis."""
    if not len(rows):
        return
    place = np.full(len(rows), 0.985 if right else 0.015)
    marker = ">" if right else "<"
    axes.plot(
        place, rows, marker, color=colour, markersize=5, label=label, transform=axes.get_yaxis_transform(), zorder=4
    )


def time_axis(axes: Axes, steps: Int64Array) -> None:
    """A linear axis of whole steps that holds all of them."""
    first, last = float(steps[0]), float(steps[-1])
    margin = max(0.5, 0.01 * (last - first))
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(require("matplotlib.ticker", "plot").MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("step")


def light_grid(axes: Axes) -> None:
    """A grid that stays behind the data, and no frame on the right and on top."""
    axes.grid(visible=True, color=GREY, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["right", "top"]].set_visible(False)


def legend(axes: Axes, *, place: Literal["best", "right", "above"] = "best") -> None:
    """A small legend, where the axes hold anything to explain; right of them or above them it hides nothing."""
    places: dict[str, dict[str, Any]] = {
        "best": {"loc": "best", "framealpha": 0.6},
        "right": {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "frameon": False},
        "above": {
            "loc": "lower right",
            "bbox_to_anchor": (1.0, 1.0),
            "frameon": False,
            "ncols": 5,
            "columnspacing": 1.0,
        },
    }
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, borderaxespad=0.3, **places[place])


def say(axes: Axes, text: str) -> None:
    """A remark in the middle."""
    axes.text(0.5, 0.5, text, ha="center", va="center", color=GREY, transform=axes.transAxes)


def empty(axes: Axes, text: str) -> Axes:
    """Says why there is nothing to see."""
    say(axes, text)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    return axes


def headline(account: Account) -> str:
    """The verdict of a run in up to four lines, in matplotlib's spelling."""
    marks = {"error": "✗", "warning": "!", "info": "·"}
    findings = account.findings
    lines = [f"{marks[f.severity]} {name_of(f.finding)}: {name_of(f.layer)}, {account.span(f)}" for f in findings[:3]]
    lines += [f"… and {len(findings) - 3} more"] if len(findings) > 3 else []
    wrong = "✗ the gradient check found wrong gradients" if account.fails("error") else "✓ no findings"
    return "\n".join(
        [
            f"{name_of(str(account.attributes.get('model', 'run')))}, {number(account.steps, 'step')}",
            *(lines or [wrong]),
        ]
    )
