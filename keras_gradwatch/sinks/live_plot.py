"""``LivePlot``: a picture in a notebook that follows the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from keras_gradwatch._optional import require
from keras_gradwatch.history import History
from keras_gradwatch.pictures import name_of, view_of
from keras_gradwatch.profiles import gradient_flow
from keras_gradwatch.records import Finding, StepRecord, TensorInfo
from keras_gradwatch.timelines import norms
from keras_gradwatch.words import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Steps kept for the picture: more points than pixels would only cost time.
_MOST_STEPS = 400
#: A redraw waits for this many times what the last one took, so that drawing costs 5 % of the time at most.
_PATIENCE = 20.0


class LivePlot:
    """A sink that draws gradient norms over time and gradient flow by depth in a notebook, while ``fit`` runs.

    The picture is replaced in place, at most every few seconds and for at most 5 % of the time. It shows a run of any
    length with up to 400 steps. ``watch.plot()`` draws everything afterwards.

    Args:
        every_seconds: time between two redraws at least; above 0.
        show: takes the finished figure; by default it is put into the output of the notebook's cell.

    Raises:
        TypeError: ``every_seconds`` is not a number.
        ValueError: ``every_seconds`` is not above 0.
        ModuleNotFoundError: when the run begins, and matplotlib is not installed.
        RuntimeError: when the run begins, and this is no notebook. As from any sink, both come as a warning.

    Example:
        >>> live = LivePlot(every_seconds=3)  # model.fit(x, y, callbacks=[GradWatch(sinks=[live])])
        >>> live.every_seconds
        3.0
    """

    def __init__(self, every_seconds: float = 5.0, *, show: Callable[[Figure], object] | None = None) -> None:
        if isinstance(every_seconds, bool) or not isinstance(every_seconds, int | float):
            raise TypeError(
                f"Received every_seconds={every_seconds!r} of type {type(every_seconds).__name__}. Expected a "
                "number of seconds. Use every_seconds=5 if in doubt."
            )
        if not every_seconds > 0:
            raise ValueError(
                f"Received every_seconds={every_seconds}. Expected more than 0. Use every_seconds=5 if in doubt."
            )
        self.every_seconds = float(every_seconds)
        self._show = show
        self._tensors: tuple[TensorInfo, ...] = ()
        self._attributes: dict[str, Any] = {}
        self._records = list[StepRecord]()
        self._findings = list[Finding]()
        self._stride, self._seen = 1, 0
        self._due = 0.0
        self._display: Callable[[Figure], object] = _nowhere

    def open(self, tensors: Sequence[TensorInfo], attributes: Mapping[str, Any]) -> None:
        """Begin a run with an empty picture."""
        require("matplotlib.pyplot", "plot")
        self._display = self._show or _notebook_display()
        self._tensors, self._attributes = tuple(tensors), dict(attributes)
        self._records, self._findings = [], []
        self._stride, self._seen = 1, 0
        self._due = time.monotonic() + self.every_seconds

    def write(self, record: StepRecord) -> None:
        """Remember the step, and draw when it is time."""
        if self._seen % self._stride == 0 or record.check is not None:
            self._records.append(record)
        self._seen += 1
        if len(self._records) > _MOST_STEPS:
            self._records, self._stride = self._records[::2], 2 * self._stride
        if time.monotonic() >= self._due:
            self._draw()

    def __call__(self, finding: Finding) -> None:
        """Remember the finding: it is marked in the next picture."""
        self._findings.append(finding)

    def close(self) -> None:
        """Draw for the last time."""
        if self._records:
            self._draw()

    def _draw(self) -> None:
        start = time.monotonic()
        figure = self.figure()
        self._display(figure)
        require("matplotlib.pyplot", "plot").close(figure)
        took = time.monotonic() - start
        self._due = start + max(self.every_seconds, _PATIENCE * took)

    def figure(self) -> Figure:
        """The picture as it is now."""
        history = History(self._tensors, self._attributes)
        for record in self._records:
            history.append(record)
        history.set_findings(self._findings)
        view = view_of(history.to_frame())
        figure: Figure
        figure, (left, right) = require("matplotlib.pyplot", "plot").subplots(
            1, 2, figsize=(13, 4.5), layout="constrained"
        )
        norms(view, ax=left)
        gradient_flow(view, ax=right)
        last = self._records[-1] if self._records else None
        words = [f"step {last.step:,}", f"epoch {last.epoch}"] if last else ["no step yet"]
        words += [f"loss {last.loss:.4g}"] if last and last.loss is not None else []
        words += [_found(self._findings)]
        figure.suptitle(" · ".join(words), x=0.01, ha="left", fontsize=11, fontweight="bold")
        return figure


def _notebook_display() -> Callable[[Figure], object]:
    """Puts figures into one place of the cell's output."""
    try:
        from IPython import get_ipython
        from IPython.display import DisplayHandle
    except ModuleNotFoundError:
        get_ipython = None
    if get_ipython is None or get_ipython() is None:
        raise RuntimeError(
            "LivePlot draws into the output of a notebook, and this is no notebook. Call watch.plot() after fit, "
            "or pass show=, a function that takes the figure"
        )
    handle, shown = DisplayHandle(), list[bool]()

    def show(figure: Figure) -> None:
        (handle.update if shown else handle.display)(figure)
        shown.append(True)

    return show


def _found(findings: Sequence[Finding]) -> str:
    if not findings:
        return "no findings so far"
    first = findings[0]
    return f"{number(len(findings), 'finding')}: {name_of(first.finding)} in {name_of(first.layer)}"


def _nowhere(figure: Figure) -> None:
    """Before a run begins there is nothing to show."""
