"""``GradWatch``: the callback. It checks its arguments, hands every event on, and decides nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_gradwatch.capture import Capture
from keras_gradwatch.display import DisplayText
from keras_gradwatch.probe import batch_of
from keras_gradwatch.records import ERROR_FINDINGS, FINDINGS, Finding
from keras_gradwatch.rollbacks import Rollback
from keras_gradwatch.rules import DEFAULT_RULES, Rule
from keras_gradwatch.run import Run, Settings
from keras_gradwatch.schedules import parse_check_schedule, parse_track_schedule
from keras_gradwatch.sinks import SinkSet

if TYPE_CHECKING:
    import os
    from pathlib import Path

    import pandas as pd
    from matplotlib.figure import Figure

_ACTIONS = ("stop", "raise", "rollback")


@keras.saving.register_keras_serializable(package="keras_gradwatch")
class GradWatch(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
    """Watches the gradients of a training run and names the layer at fault.

    On every tracked step it takes the true gradient of the real step, per weight (unscaled, before clipping). On every
    checked step it compares, before the weights move, the gradients of a small probe with the slopes of its loss in
    float64. Weights, optimizer, metrics and seeds are the same with and without it.

    Args:
        probe: an int: that many samples from the head of the live training batch (8 is plenty: the check judges the
            formula, not the data). Or fixed data: ``(x, y[, sample_weight])``, dict inputs, a ``tf.data.Dataset``, a
            ``PyDataset``, a generator (the first batch), or a callable that returns a batch.
        check_freq: gradient check every N steps (int), ``"epoch"`` (first step of the run and of each epoch),
            ``"start"`` (first step only), ``"auto"`` (as often as 2 % of the training time allows) or ``None`` (never).
        track_freq: gradient statistics every N steps; ``None`` switches them off.
        rules: ``"default"`` or a sequence of callables ``rule(window) -> findings``.
        stop_on: names of findings that end training, or ``"errors"`` for mismatch, nonfinite and disconnected.
        action: what ``stop_on`` does: ``"stop"`` sets ``model.stop_training``; ``"raise"`` raises out of ``fit`` before
            any callback sees the step; ``"rollback"`` goes back to the last healthy state, cuts the learning rate and
            goes on with the next batch, a few times: see :class:`~keras_gradwatch.Rollback`, which may be given
            instead of the word.
        surrogates: names or paths of layers whose backward differs from the forward on purpose.
        sinks: callables that take each new finding; see :mod:`keras_gradwatch.sinks`.
        seed: of the check's directions.
        verbose: 0 silent, 1 a line per finding and a closing summary.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the right type but no meaning.

    Example:
        >>> watch = GradWatch(stop_on="errors", verbose=0)
        >>> watch.history.empty  # a DataFrame, filled by model.fit(x, y, callbacks=[watch])
        True
    """

    def __init__(
        self, probe: Any = 8, *, check_freq: int | str | None = "epoch", track_freq: int | None = 1,
        rules: str | Sequence[Rule] = "default", stop_on: str | Sequence[str] = (), action: str | Rollback = "stop",
        surrogates: Sequence[str] = (), sinks: Sequence[Callable[[Finding], object]] = (), seed: int = 0,
        verbose: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        parse_check_schedule(check_freq)
        parse_track_schedule(track_freq)
        self.probe, self.check_freq, self.track_freq = _checked_probe(probe), _plain(check_freq), _plain(track_freq)
        self.rules = rules if rules == "default" else _checked_rules(rules)
        self.stop_on = _checked_stop_on(stop_on, known_only=rules == "default")
        self.action = action if isinstance(action, Rollback) else _checked_choice("action", action, _ACTIONS)
        self.surrogates = _checked_names("surrogates", surrogates)
        self.sinks = _checked_sinks(sinks)
        self.seed = int(_checked_choice("seed", seed, None))
        self.verbose = int(_checked_choice("verbose", verbose, (0, 1)))
        self._sink_set = SinkSet(self.sinks)
        self._run = Run(None, self._settings())
        self._capture: Capture | None = None

    @property
    def history(self) -> pd.DataFrame:
        """Everything measured so far, one row per (step, tensor), with the columns of ``docs/history.md``."""
        return self._run.frame()

    def to_frame(self) -> pd.DataFrame:
        """The same as :attr:`history`."""
        return self.history

    @property
    def findings(self) -> pd.DataFrame:
        """What was found so far, one row per finding with layer, tensor, steps, severity, message and advice."""
        return self._run.findings_frame()

    @property
    def cost(self) -> dict[str, float]:
        """Seconds spent in ``capture``, ``checks`` and ``sinks``, their shares of the training time, and that time."""
        return self._run.cost()

    def summary(self) -> str:
        """What a person should know about the run, verdict first: text that a terminal shows in colour."""
        return DisplayText(self._run.summary())

    def _repr_html_(self) -> str:
        from keras_gradwatch.account import account_of
        from keras_gradwatch.notebook import run_html

        return run_html(account_of(self.history))

    def plot(self) -> Figure:
        """All pictures of the run on one page; see :mod:`keras_gradwatch.plots`. Needs the extra ``plot``."""
        from keras_gradwatch.plots import overview

        return overview(self.history)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Writes the run as one page of HTML that loads nothing, and returns its path. Needs the extra ``report``."""
        from keras_gradwatch.report import write_report

        return write_report(self.history, path)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Start afresh and begin to watch."""
        self._stop_watching()
        if isinstance(self.probe, Iterator):
            self.probe = batch_of(self.probe).parts  # its first batch, for this and every later run
        self._run = Run(self.model, self._settings(), release=self._stop_watching, retrace=self._retrace)
        self._run.begin()
        self._capture = Capture.attach(self.model, self._run)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Note where the epoch starts."""
        self._run.begin_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Tell the capture that this run is alive."""
        if self._capture is not None:
            self._capture.begin_batch()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Put the three keys into the logs: always all of them, NaN where nothing was measured."""
        keys = self._run.end_epoch()
        if logs is not None:
            logs.update(keys)

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Last look at the run, then leave the model as it was."""
        self._run.end()
        self._stop_watching()

    def get_config(self) -> dict[str, Any]:
        """Settings as JSON-able values.

        Raises:
            TypeError: probe data, rule objects or sinks were given: they have no JSON form.
        """
        for name, value, plain in (
            ("probe", self.probe, isinstance(self.probe, int)),
            ("rules", self.rules, self.rules == "default"),
            ("sinks", self.sinks, not self.sinks),
        ):
            if not plain:
                raise TypeError(
                    f"Received {name} of type {type(value).__name__}. Expected the default kind, which has a JSON "
                    f"form. Build the callback without {name} to save its configuration, and set it after loading."
                )
        names = ("probe", "check_freq", "track_freq", "rules", "seed", "verbose")
        config = {name: getattr(self, name) for name in names}
        action = asdict(self.action) if isinstance(self.action, Rollback) else self.action
        return config | {"action": action, "stop_on": list(self.stop_on), "surrogates": list(self.surrogates)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> GradWatch:
        """The callback that :meth:`get_config` describes."""
        action = config.get("action", "stop")
        return cls(**{**config, "action": Rollback(**action) if isinstance(action, Mapping) else action})

    def _settings(self) -> Settings:
        return Settings(
            probe=self.probe, check_freq=self.check_freq, track_freq=self.track_freq,
            rules=DEFAULT_RULES if self.rules == "default" else tuple(self.rules),  # type: ignore[arg-type]
            stop_on=self.stop_on, action=self.action, surrogates=self.surrogates, sinks=self._sink_set, seed=self.seed,
            verbose=self.verbose,
        )  # fmt: skip

    def _retrace(self) -> None:
        if self._capture is not None:
            self._capture.retrace()

    def _stop_watching(self) -> None:
        if self._capture is not None:
            self._capture.detach()
            self._capture = None


def _checked_probe(probe: Any) -> Any:
    if isinstance(probe, bool) or probe is None or isinstance(probe, float | str):
        raise TypeError(
            f"Received probe={probe!r} of type {type(probe).__name__}. Expected a number of samples, or data: "
            "(x, y[, sample_weight]), a Dataset, a PyDataset, a generator or a callable. Use probe=8 if in doubt."
        )
    if isinstance(probe, int | np.integer):
        if probe < 1:
            raise ValueError(f"Received probe={probe}. Expected at least 1 sample. Use probe=8 if in doubt.")
        return int(probe)
    if isinstance(probe, tuple | list | dict) or hasattr(probe, "shape"):
        batch_of(probe)  # an empty or ragged batch is told at once; iterators are left alone until training begins
    elif not callable(probe) and not hasattr(probe, "__iter__") and not hasattr(probe, "__getitem__"):
        raise TypeError(
            f"Received probe of type {type(probe).__name__}. Expected a number of samples, or data: "
            "(x, y[, sample_weight]), a Dataset, a PyDataset, a generator or a callable. Use probe=8 if in doubt."
        )
    return probe


def _checked_rules(rules: Any) -> tuple[Rule, ...]:
    if isinstance(rules, str) or not isinstance(rules, Sequence) or not all(callable(rule) for rule in rules):
        raise TypeError(
            f'Received rules={rules!r}. Expected "default" or a sequence of callables that take a window and return '
            "findings. See keras_gradwatch.rules."
        )
    return tuple(rules)


def _checked_stop_on(stop_on: Any, *, known_only: bool) -> tuple[str, ...]:
    if stop_on == "errors":
        return ERROR_FINDINGS
    names = (stop_on,) if isinstance(stop_on, str) else _checked_names("stop_on", stop_on)
    unknown = [name for name in names if name not in FINDINGS]
    if unknown and known_only:
        raise ValueError(
            f'Received stop_on with {", ".join(map(repr, unknown))}. Expected "errors" or names among '
            f"{', '.join(FINDINGS)}. Correct the name."
        )
    return names


def _checked_sinks(sinks: Any) -> tuple[Callable[[Finding], object], ...]:
    if isinstance(sinks, str) or not isinstance(sinks, Sequence):
        raise TypeError(
            f"Received sinks={sinks!r}. Expected a sequence of callables that take a finding. "
            "Put a single one into a tuple: sinks=(sink,)."
        )
    return tuple(sinks)


def _plain(value: Any) -> Any:
    """A NumPy integer as an int, for the configuration."""
    return int(value) if isinstance(value, np.integer) else value


def _checked_names(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
        raise TypeError(f"Received {name}={value!r}. Expected a sequence of names. Write it as ({value!r},).")
    return tuple(value)


def _checked_choice(name: str, value: Any, choices: Sequence[Any] | None) -> Any:
    if choices is None:
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"Received {name}={value!r} of type {type(value).__name__}. Expected an int. Use {name}=0.")
    elif isinstance(value, bool) or value not in choices:
        raise ValueError(
            f"Received {name}={value!r}. Expected one of {', '.join(map(repr, choices))}. Choose one of them."
        )
    return value
