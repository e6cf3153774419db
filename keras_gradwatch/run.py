"""One watched call of ``fit``: what is due, what was seen, what was found. The mutable part of the callback."""

from __future__ import annotations

import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_gradwatch.activations import Looks
from keras_gradwatch.capture import CapturedStep, Request
from keras_gradwatch.checks import Checker
from keras_gradwatch.display import DisplayText
from keras_gradwatch.errors import GradientCheckError, GradientError, NonFiniteGradientError, gist
from keras_gradwatch.findings import Ledger
from keras_gradwatch.history import History
from keras_gradwatch.probe import Batch, arrays_of, batch_of, check_fits, describe_weights, fixed_batch_size, has_loss
from keras_gradwatch.records import STATISTICS, CheckResult, Culprit, Finding, StepRecord, TensorInfo, Window
from keras_gradwatch.rules import DEFAULT_RULES, Rule
from keras_gradwatch.schedules import parse_check_schedule, parse_track_schedule
from keras_gradwatch.sinks import SinkSet, user_stacklevel
from keras_gradwatch.stats import statistics_of

if TYPE_CHECKING:
    import pandas as pd

#: Sampled steps a rule sees at most, and how often rules are asked when nothing special happens.
WINDOW_STEPS = 200
RULE_EVERY = 25

#: Where the optimizer's gradients cannot be seen, the probe's are taken every so many steps: each costs about one step.
FALLBACK_EVERY = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The callback's arguments, checked."""

    probe: Any
    check_freq: int | str | None
    track_freq: int | None
    rules: Sequence[Rule]
    stop_on: tuple[str, ...]
    action: str
    surrogates: tuple[str, ...]
    sinks: SinkSet
    seed: int
    verbose: int


class Run:
    """Follows one training run as a :class:`~keras_gradwatch.capture.Listener`.

    Steps arrive counted from 1; the history counts the optimizer's steps, so a resumed run goes on where it stopped.

    Args:
        model: the model in training; ``None`` before the first run.
        settings: the callback's arguments.
        release: called before an error is raised out of ``fit``, which then tells no callback that it ends.
    """

    def __init__(self, model: Any, settings: Settings, *, release: Callable[[], None] = lambda: None) -> None:
        self._model, self._settings, self._release = model, settings, release
        self._check_schedule = parse_check_schedule(settings.check_freq)
        self._track_schedule = parse_track_schedule(settings.track_freq)
        self._ledger, self._history = Ledger(), History((), {})
        self._recent: deque[StepRecord] = deque(maxlen=WINDOW_STEPS)
        self._checks: list[CheckResult] = []
        self._weights: list[tuple[TensorInfo, Any]] = []
        self._rows: dict[int, int] = {}
        self._seconds = {"capture": 0.0, "checks": 0.0, "activations": 0.0, "sinks": 0.0}
        self._checker: Checker | None = None
        self._looks: Looks | None = None
        self._epoch_batches, self._epoch_losses, self._epoch_noise = _Mean(), list[float](), list[float]()
        self._probe: Batch | None = None
        self._check: CheckResult | None = None
        self._fallback_statistics: Any = None
        self._checks_due: set[int] = set()
        self._epoch, self._epoch_start, self._offset, self._steps, self._at = 0, 1, 0, 0, 1
        self._epoch_norms, self._epoch_error = _Mean(), float("nan")
        self._since_rules, self._began, self._ended = 0, time.perf_counter(), 0.0
        self._clock, self._spent = self._began, dict(self._seconds)
        self._fallback_since, self._opened = 0, False
        self._failed: set[str] = set()
        self._notes: list[str] = []

    def begin(self) -> None:
        """Look at the model before its first step."""
        if not isinstance(self._settings.probe, int):
            self._probe = arrays_of(batch_of(self._settings.probe))
            check_fits(self._model, self._probe)
        with self._guarded("capture"):
            self._describe()
            self._offset = _steps_done(self._model)
            self._checker = Checker(self._model, surrogates=self._settings.surrogates)
            self._looks = Looks(self._model, offset=self._offset)
        self._began = self._clock = time.perf_counter()

    def begin_epoch(self, epoch: int) -> None:
        """The next step is the first of an epoch."""
        self._epoch, self._epoch_start = epoch, self._steps + 1
        self._epoch_norms, self._epoch_error, self._epoch_batches = _Mean(), float("nan"), _Mean()

    def wants(self, step: int) -> Request:
        """What the coming step must provide."""
        first = step == self._epoch_start
        check = self._check_schedule.due(step, first) and "checks" not in self._failed
        (self._checks_due.add if check else self._checks_due.discard)(step)
        track = self._track_schedule.due(step, first)
        if self._fallback_since:
            return Request(batch=first or check or (track and self._fallback_due(step)))
        # A tracked step hands its batch over afterwards anyway: one that goes NaN is run again to find out why.
        return Request(track=track, batch=first or check)

    def before_step(self, step: int, batch: Any) -> None:
        """Check the gradients, if it is time, before the weights move."""
        self._at = step
        if self._checker is None:
            return
        if step in self._checks_due:
            with self._guarded("checks"):
                self._check = self._checker.check(self._probe_of(batch), seed=self._settings.seed + self._offset + step)
                self._checks.append(self._check)
        if self._looks is not None:
            with self._guarded("activations"):
                samples = Batch(*keras.utils.unpack_x_y_sample_weight(batch))
                self._looks.before_step(step, samples, due=step in self._checks_due)
        if self._fallback_due(step):
            with self._guarded("capture"):
                self._fallback_statistics = self._probe_statistics(batch)

    def after_step(self, step: int, captured: CapturedStep | None) -> None:
        """Record the step, and ask the rules when it is time."""
        self._steps = self._at = step
        self._checks_due.discard(step)
        self._tell_schedule()
        if captured is None and self._check is None and self._fallback_statistics is None:
            return
        if self._looks is not None and captured is not None and captured.batch is not None:
            with self._guarded("activations"):
                self._looks.after_step(step, Batch(*keras.utils.unpack_x_y_sample_weight(captured.batch)))
        rules_due = False
        with self._guarded("capture"):
            self._open()
            if captured is not None and not captured.variables and self._weights:
                self._fall_back()
            record = self._record(step, captured)
            self._keep(record)
            self._since_rules += 1
            alarming = _nonfinite(record) and not self._found("nonfinite")
            rules_due = alarming or record.check is not None or self._since_rules >= RULE_EVERY
        self._check, self._fallback_statistics = None, None
        if rules_due:
            self._act(self._ask_rules())

    def end_epoch(self) -> dict[str, float]:
        """The three keys for the logs of the epoch that ends."""
        self._epoch_losses.append(self._epoch_batches.value)
        self._epoch_noise.append(self._epoch_batches.standard_error)
        if self._looks is not None:
            with self._guarded("activations"):
                self._looks.end_epoch(self._steps)
        self._act(self._ask_rules())
        with self._guarded("sinks"):
            self._settings.sinks.sum_up(self._account())
        first = self._offset + self._epoch_start
        return {
            "grad_norm": self._epoch_norms.value,
            "grad_check_error": self._epoch_error,
            "grad_findings": float(sum(f.last_step >= first for f in self._ledger.findings)),
        }

    def end(self) -> None:
        """Close the books."""
        self._act(self._ask_rules(ended=True))
        self._finish()

    def frame(self) -> pd.DataFrame:
        """The history so far; its ``attrs`` hold the rest of the account, for reports from a file."""
        self._history.set_findings(self._ledger.findings)
        frame = self._history.to_frame()
        frame.attrs.update(self._account())
        return frame

    def findings_frame(self) -> pd.DataFrame:
        """The findings so far, one row each."""
        import pandas as pd

        columns = [field.name for field in fields(Finding) if field.name not in ("tensors", "explains")]
        return pd.DataFrame([[getattr(f, c) for c in columns] for f in self._ledger.findings], columns=columns)

    def cost(self) -> dict[str, float]:
        """Seconds and shares of the training time."""
        total = (self._ended or time.perf_counter()) - self._began
        training = max(total - sum(self._seconds.values()), 1e-9)
        cost = {f"{name}_seconds": seconds for name, seconds in self._seconds.items()}
        cost |= {f"{name}_share": seconds / training for name, seconds in self._seconds.items()}
        return cost | {"training_seconds": training, "share": sum(self._seconds.values()) / training}

    def summary(self) -> str:
        """Text for a terminal."""
        from keras_gradwatch.summary import summarize

        tensors = self._checks[0].tensors if self._checks else tuple(info for info, _ in self._weights)
        share, training = (self.cost()[key] if self._steps else float("nan") for key in ("share", "training_seconds"))
        return summarize(
            steps=self._steps, tensors=tensors, findings=self._ledger.findings, checks=tuple(self._checks),
            cost_share=share, cost_seconds=share * training, notes=tuple(self._notes),
        )  # fmt: skip

    # -- what happens inside -------------------------------------------------------------------------------------------

    @contextmanager
    def _guarded(self, part: str) -> Iterator[None]:
        """Time a part of the watcher; its failure is told once and never reaches training."""
        try:
            with self._timed(part if part in self._seconds else "capture"):
                yield
        except Exception as error:  # noqa: BLE001  training must not break because of the watcher
            self._fail(part, error)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """Add to the seconds of a part; a part inside another counts once."""
        start, others = time.perf_counter(), sum(self._seconds.values())
        try:
            yield
        finally:
            self._seconds[part] += time.perf_counter() - start - (sum(self._seconds.values()) - others)

    def _tell_schedule(self) -> None:
        """Seconds of checks and of training since the last step."""
        now, before = time.perf_counter(), self._spent
        self._spent = dict(self._seconds)
        spent = sum(self._spent.values()) - sum(before.values())
        self._check_schedule.record(self._spent["checks"] - before["checks"], now - self._clock - spent)
        self._clock = now

    def _fail(self, part: str, error: Exception) -> None:
        if part in self._failed:
            return
        self._failed.add(part)
        step = self._offset + self._at
        message = f"GradWatch itself failed in {part} at step {step}: {gist(error)}"
        finding = Finding(
            finding="watcher_failed", layer="GradWatch", first_step=step, last_step=step, severity="info",
            message=message,
            advice=f"training goes on unharmed, without {part}; {self._remedy(part)}please report this message",
        )  # fmt: skip
        self._ledger.update((*self._ledger.active, finding), step)
        warnings.warn(f"{message}. Training goes on.", RuntimeWarning, stacklevel=user_stacklevel(sys._getframe()))

    def _remedy(self, part: str) -> str:
        if part == "rules" and self._settings.rules is not DEFAULT_RULES:
            return "if one of your own rules raised it, mend that; otherwise "
        if part == "checks" and self._probe is not None:
            return "if the probe has not the form of the training batches, mend that; otherwise "
        return ""

    def _probe_of(self, data: Any) -> Batch:
        if self._probe is not None:
            return self._probe
        count = fixed_batch_size(self._model) or self._settings.probe
        return Batch(*keras.utils.unpack_x_y_sample_weight(data)).head(count)

    def _fall_back(self) -> None:
        """From now on, look at the probe instead of the optimizers."""
        self._fallback_since = self._steps + 1
        note = "train_step calls no Keras optimizer that could be seen"
        if has_loss(self._model):
            self._notes.append(f"{note}: norms are of the compiled loss on the probe, every {FALLBACK_EVERY} steps")
        else:
            self._notes.append(f"{note}, and compile was given no loss: no gradient can be measured")

    def _fallback_due(self, step: int) -> bool:
        since = self._fallback_since
        return 0 < since <= step and (step - since) % FALLBACK_EVERY == 0 and has_loss(self._model)

    def _probe_statistics(self, data: Any) -> tuple[Any, Any, float]:
        """Statistics of the probe's own gradient, where the optimizer's cannot be seen."""
        assert self._checker is not None  # noqa: S101  type narrowing
        subject, point = self._checker.gradients(self._probe_of(data))
        rows = np.full((len(self._weights), len(STATISTICS)), np.nan)
        connected = np.zeros(len(self._weights), dtype=bool)
        for variable, gradient in zip(subject.variables, point.gradients, strict=False):
            row = self._rows.get(id(variable))
            if row is not None and gradient is not None:
                value = keras.ops.convert_to_numpy(variable.value)
                rows[row] = statistics_of(keras.ops.convert_to_numpy(gradient), value, np.full_like(value, np.nan))
                connected[row] = True
        return rows, connected, point.loss

    def _record(self, step: int, captured: CapturedStep | None) -> StepRecord:
        count = len(self._weights)
        statistics, connected, loss = np.full((count, len(STATISTICS)), np.nan), np.ones(count, dtype=bool), None
        if self._fallback_statistics is not None:
            statistics, connected, loss = self._fallback_statistics
        elif captured is not None and captured.variables:
            places = [self._rows.get(id(variable), -1) for variable in captured.variables]
            known = [k for k, place in enumerate(places) if place >= 0]
            rows = [places[k] for k in known]
            statistics[rows] = captured.statistics[known]
            connected[rows] = np.asarray(captured.connected)[known]
        if captured is not None:
            loss = captured.loss
        record = StepRecord(
            step=self._offset + step, epoch=self._epoch, loss=loss, statistics=statistics, connected=connected,
            learning_rate=_learning_rate(self._model), check=self._check,
        )  # fmt: skip
        if _harmful(record) and not self._found("nonfinite"):
            with self._guarded("checks"):
                return replace(record, culprits=self._diagnose(captured))
        return record

    def _diagnose(self, captured: CapturedStep | None) -> tuple[Culprit, ...]:
        """Run the batch that went NaN again, with the weights from before the step."""
        if captured is None or captured.batch is None or captured.previous_weights is None or self._checker is None:
            return ()
        before = {id(v): w for v, w in zip(captured.variables, captured.previous_weights, strict=True)}
        batch = Batch(*keras.utils.unpack_x_y_sample_weight(captured.batch))
        return self._checker.diagnose(batch, before)

    def _found(self, finding: str) -> bool:
        return any(entry.finding == finding for entry in self._ledger.findings)

    def _describe(self) -> None:
        self._weights = describe_weights(self._model)
        self._rows = {id(variable): row for row, (_, variable) in enumerate(self._weights)}

    def _open(self) -> None:
        """Begin the history with the first step that is seen: a model may be built inside it."""
        if self._opened:
            return
        self._opened = True
        self._describe()
        tensors = tuple(info for info, _ in self._weights)
        inputs = tuple(t for t in self._check.tensors if t.role == "input") if self._check else ()
        self._history = History((*tensors, *inputs), self._attributes())
        with self._timed("sinks"):
            self._settings.sinks.open((*tensors, *inputs), self._attributes())

    def _keep(self, record: StepRecord) -> None:
        self._recent.append(record)
        self._history.append(record)
        self._epoch_norms.add(_global_norm(record))
        self._epoch_batches.add(float("nan") if record.loss is None else record.loss)
        errors = [c.error for c in record.check.checks] if record.check else []
        self._epoch_error = float(np.fmax.reduce([self._epoch_error, *filter(np.isfinite, errors)]))
        with self._timed("sinks"):
            self._settings.sinks.write(record)

    def _ask_rules(self, *, ended: bool = False) -> tuple[Finding, ...]:
        self._since_rules = 0
        if (self._recent or (self._looks is not None and self._looks.records)) and "rules" not in self._failed:
            with self._guarded("rules"):
                window = self._window(ended=ended)
                found = [finding for rule in self._settings.rules for finding in rule(window)]
                return self._ledger.update(found, self._offset + self._steps)
        return ()

    def _window(self, *, ended: bool) -> Window:
        records, weights = list(self._recent), len(self._weights)
        checked = [r for r in records if r.check is not None]
        return Window(
            tensors=tuple(info for info, _ in self._weights),
            steps=np.array([r.step for r in records], dtype=np.int64),
            epochs=np.array([r.epoch for r in records], dtype=np.int64),
            losses=np.array([np.nan if r.loss is None else r.loss for r in records]),
            loss_known=np.array([r.loss is not None for r in records], dtype=bool),
            learning_rates=np.array([r.learning_rate for r in records]),
            statistics=np.array([r.statistics for r in records]).reshape(len(records), weights, len(STATISTICS)),
            connected=np.array([r.connected for r in records], dtype=bool).reshape(len(records), weights),
            check=checked[-1].check if checked else None, check_step=checked[-1].step if checked else 0,
            culprits=next((r.culprits for r in records if r.culprits), ()),
            activations=tuple(self._looks.records) if self._looks is not None else (),
            epoch_losses=np.array(self._epoch_losses), epoch_noise=np.array(self._epoch_noise),
            planned_steps=_planned_steps(self._model, self._steps, len(self._epoch_losses)), ended=ended,
        )  # fmt: skip

    def _act(self, new: Sequence[Finding]) -> None:
        """Tell the world about new findings, and stop when asked to."""
        for finding in new:
            if self._settings.verbose:
                print(f"\nGradWatch · step {finding.first_step} · {finding.severity} · {finding.message}")  # noqa: T201
            with self._timed("sinks"):
                self._settings.sinks(finding)
        reasons = [finding for finding in new if finding.finding in self._settings.stop_on]
        if not reasons:
            return
        self._model.stop_training = True
        if self._settings.action == "raise":
            self._finish()
            self._release()
            raise _error_of(reasons[0], self._checks[-1] if self._checks else None)

    def _finish(self) -> None:
        if self._ended:
            return
        self._ended = time.perf_counter()
        self._checker = None
        if self._looks is not None and self._looks.failure:
            self._notes.append(f"activations could not be looked at: {self._looks.failure}")
        self._looks = None
        with self._timed("sinks"):
            if self._opened:
                self._settings.sinks.sum_up(self._account())
            self._settings.sinks.close()
        if self._settings.verbose:
            with self._guarded("summary"):
                print("", DisplayText(self.summary()), sep="\n")  # noqa: T201

    def _account(self) -> dict[str, object]:
        """What the rows do not say, fit for JSON."""
        return {
            "findings": [{**asdict(finding), "tensors": list(finding.tensors)} for finding in self._ledger.findings],
            "cost": self.cost(), "steps": self._steps,
            "gradients": "probe" if self._fallback_since else "training step",
            "notes": list(dict.fromkeys((*self._notes, *(note for check in self._checks for note in check.notes)))),
            "layer_classes": {info.layer: info.layer_class for info, _ in self._weights},
            "reasons": {c.tensor: c.reason for result in self._checks for c in result.checks if c.reason},
        }  # fmt: skip

    def _attributes(self) -> dict[str, object]:
        from keras_gradwatch import __version__

        settings = self._settings
        return {
            "keras_gradwatch": __version__, "keras": keras.__version__, "backend": keras.backend.backend(),
            "model": self._model.name, "check_freq": settings.check_freq, "track_freq": settings.track_freq,
            "probe": settings.probe if isinstance(settings.probe, int) else "fixed data", "seed": settings.seed,
            "surrogates": list(settings.surrogates), "first_step": self._offset + 1,
        }  # fmt: skip


class _Mean:
    """Mean of the finite numbers added, and how sure it is; NaN when there is none."""

    def __init__(self) -> None:
        self._sum, self._count, self._mean, self._squares = 0.0, 0, 0.0, 0.0

    def add(self, number: float) -> None:
        if np.isfinite(number):
            self._sum, self._count = self._sum + number, self._count + 1
            # Welford (1962): sum of squares about the running mean, safe from cancellation.
            before, self._mean = self._mean, self._mean + (number - self._mean) / self._count
            self._squares += (number - before) * (number - self._mean)

    @property
    def standard_error(self) -> float:
        """Spread of the numbers / square root of their number; NaN for fewer than two."""
        count = self._count
        return float(np.sqrt(self._squares / (count - 1) / count)) if count > 1 else float("nan")

    @property
    def value(self) -> float:
        return self._sum / self._count if self._count else float("nan")


def _steps_done(model: Any) -> int:
    """Steps the model's optimizer has taken, each micro-batch of an accumulation counted."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not optimizer.built:
        return 0
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return int(np.asarray(inner.iterations)) * (inner.gradient_accumulation_steps or 1)


def _planned_steps(model: Any, steps: int, epochs: int) -> int:
    """Steps that ``fit`` is going to run; 0 while nobody knows."""
    plan = getattr(getattr(model, "history", None), "params", None) or {}
    per_epoch = plan.get("steps") or (steps / epochs if epochs else 0)
    return int(per_epoch * (plan.get("epochs") or 0))


def _learning_rate(model: Any) -> float:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return float("nan")
    rate = optimizer.learning_rate
    return float(np.asarray(rate))


def _nonfinite(record: StepRecord) -> bool:
    counts = record.statistics[:, STATISTICS.index("nonfinite_count")]
    return bool((record.loss is not None and not np.isfinite(record.loss)) or np.nansum(counts) > 0)


def _harmful(record: StepRecord) -> bool:
    """Non-finite, and not merely skipped by loss scaling: the loss is lost or a weight has moved."""
    lost = record.loss is not None and not np.isfinite(record.loss)
    moved = record.statistics[:, STATISTICS.index("update_ratio")] != 0.0  # NaN has moved, too
    return _nonfinite(record) and (lost or bool(moved.any()))


def _global_norm(record: StepRecord) -> float:
    """Norm of all gradients of a step together; NaN when none was measured or any is not finite."""
    norms = record.statistics[:, STATISTICS.index("grad_norm")]
    if np.isnan(norms).all() or _nonfinite(record):
        return float("nan")
    return float(np.sqrt(np.nansum(np.square(norms))))


def _error_of(finding: Finding, check: CheckResult | None) -> GradientError:
    text = f"{finding.finding} in {finding.layer} at step {finding.first_step}: {finding.message}"
    text += f" {finding.advice}" if finding.advice else ""
    kinds = {"nonfinite": NonFiniteGradientError, "mismatch": GradientCheckError}
    return kinds.get(finding.finding, GradientError)(text, finding=finding, result=check)
