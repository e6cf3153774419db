"""Statistics of the probe's own gradient, for a ``train_step`` whose optimizer cannot be seen."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_gradwatch.checks import Checker
from keras_gradwatch.optimizers import host
from keras_gradwatch.probe import Batch, has_loss
from keras_gradwatch.records import STATISTICS, Float64Array
from keras_gradwatch.stats import statistics_of

#: Where the optimizer's gradients cannot be seen, the probe's are taken every so many steps: each costs about one step.
EVERY = 10

Numbers = tuple[Float64Array, "np.ndarray[Any, np.dtype[np.bool_]]", float]


class Fallback:
    """Decides when to look at the probe instead of the optimizers: never, until :meth:`begin`.

    Attributes:
        since: the first step that is looked at this way; 0 before :meth:`begin`.
        numbers: statistics, connections and loss of the step in progress; ``None`` when none were taken.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.since = 0
        self.numbers: Numbers | None = None

    def begin(self, step: int) -> str:
        """From ``step`` on, look at the probe; gives the note that says so."""
        self.since = step
        note = "train_step calls no Keras optimizer that could be seen"
        if has_loss(self._model):
            return f"{note}: norms are of the compiled loss on the probe, every {EVERY} steps"
        return f"{note}, and compile was given no loss: no gradient can be measured"

    def is_due(self, step: int) -> bool:
        """Whether this step's numbers are to be taken from the probe."""
        return 0 < self.since <= step and (step - self.since) % EVERY == 0 and has_loss(self._model)

    def read(self, checker: Checker, probe: Batch, *, rows: dict[int, int]) -> None:
        """Take the numbers of the probe.

        Args:
            checker: of the model.
            probe: samples.
            rows: row of each weight in the statistics, by ``id`` of its variable.
        """
        subject, point = checker.gradients(probe)
        statistics, connected = np.full((len(rows), len(STATISTICS)), np.nan), np.zeros(len(rows), dtype=bool)
        for variable, gradient in zip(subject.variables, point.gradients, strict=False):
            row = rows.get(id(variable))
            if row is not None and gradient is not None:
                value = host(variable.value)
                statistics[row] = statistics_of(host(gradient), value, np.full_like(value, np.nan))
                connected[row] = True
        self.numbers = (statistics, connected, point.loss)
