"""The pictures of a report as SVG that takes its ink from the page, so that it suits a light and a dark one."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from typing import Any

from keras_gradwatch import plots
from keras_gradwatch._optional import require
from keras_gradwatch.pictures import View, height_for

#: Stands for the page's ink while matplotlib draws; no picture uses it for anything else.
_INK = "#010203"

_INK_SETTINGS = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
_CLEAR_SETTINGS = ("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor")

_CAPTIONS: dict[str, str] = {
    "heat_map": "Each row is a layer, the input on top; time runs to the right. Bright: strong gradient, dark: weak. "
    "A frame shows where and when a finding holds.",
    "gradient_flow": "Strength of the gradient in each layer. In the shaded band it is within a factor 100 of the "
    "layers nearest the loss. Where the line leaves the band to the left, gradients fade before they reach the input.",
    "check_errors": "Analytic gradient against the measured slope of the loss. Marks inside the grey bars are right as "
    "far as can be seen; crosses beyond them are wrong formulas. Of several checks the worst is shown.",
    "norms": "Gradient norm of the layers over time. Falling to nothing or shooting up is not healthy.",
    "update_ratios": "How far each layer moves per step, for its size. Far below the shaded band it hardly learns; "
    "above it, steps may be too large.",
    "losses": "The loss of each batch itself, not the running mean that Keras shows.",
}


def drawings(view: View) -> list[dict[str, str]]:
    """The pictures of a run.

    Args:
        view: the run.

    Returns:
        For each picture its ``svg`` and its ``caption``, the most telling one first.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    layers, tensors = height_for(len(view.samples.layers)), height_for(len(view.account.tensors))
    heights = {"heat_map": layers + 0.7, "gradient_flow": layers + 0.7, "check_errors": tensors, "norms": 4.2}
    matplotlib = require("matplotlib", "report")
    with matplotlib.rc_context(), warnings.catch_warnings():
        # A glyph that matplotlib's own font lacks is drawn by the browser all the same.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**dict.fromkeys(_INK_SETTINGS, _INK), **dict.fromkeys(_CLEAR_SETTINGS, "none")})
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "keras_gradwatch"})
        return [
            {"svg": _svg(view, name, heights.get(name, 3.8)), "caption": caption} for name, caption in _CAPTIONS.items()
        ]


def _svg(view: View, name: str, height: float) -> str:
    figure: Any = require("matplotlib.figure", "report").Figure(figsize=(8.0, height), layout="constrained")
    draw: Callable[..., Any] = getattr(plots, name)
    draw(view, ax=figure.subplots())
    file = io.StringIO()
    figure.savefig(file, format="svg", dpi=120, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    # Several pictures share the page, so each keeps its identifiers to itself.
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"<svg ", f'<svg role="img" aria-label="{name.replace("_", " ")}" ', svg, count=1)
    return re.sub(r"\n\s*", "\n", svg)
