"""One watched call of ``fit``: what is due, what was seen, what was found. The mutable part of the callback."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_gradwatch.actions import Actions, error_of
from keras_gradwatch.activations import Looks
from keras_gradwatch.capture import CapturedStep, Request
from keras_gradwatch.check_log import CheckLog
from keras_gradwatch.checks import Checker
from keras_gradwatch.costs import Costs
from keras_gradwatch.display import DisplayText
from keras_gradwatch.epochs import Epochs, is_harmful, is_nonfinite
from keras_gradwatch.errors import gist
from keras_gradwatch.fallback import Fallback
from keras_gradwatch.findings import Ledger
from keras_gradwatch.halving import row_words
from keras_gradwatch.history import History
from keras_gradwatch.incidents import ROWS_BEFORE, Before, StepIncident
from keras_gradwatch.optimizers import leading_optimizer, learning_rate, planned_steps, restore_schedules, steps_done
from keras_gradwatch.probe import Batch, arrays_of, batch_of, check_fits, describe_weights, fixed_batch_size
from keras_gradwatch.records import STATISTICS, CheckResult, Culprit, Finding, StepRecord, TensorInfo, Window
from keras_gradwatch.rollbacks import Rollback
from keras_gradwatch.rules import DEFAULT_RULES, Rule
from keras_gradwatch.schedules import parse_check_schedule, parse_track_schedule
from keras_gradwatch.sinks import SinkSet, user_stacklevel
from keras_gradwatch.suspects import Suspect, Suspects, batch_seen, weights_before
from keras_gradwatch.windows import window_of

if TYPE_CHECKING:
    import pandas as pd

#: Sampled steps a rule sees at most, and how often rules are asked when nothing special happens.
WINDOW_STEPS = 200
RULE_EVERY = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The callback's arguments, checked."""

    probe: Any
    check_freq: int | str | None
    track_freq: int | None
    rules: Sequence[Rule]
    stop_on: tuple[str, ...]
    action: str | Rollback
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
        retrace: called when something changed that a compiled step holds inside it.
    """

    def __init__(
        self, model: Any, settings: Settings, *, release: Callable[[], None] = lambda: None,
        retrace: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._model, self._settings, self._release = model, settings, release
        self._check_schedule = parse_check_schedule(settings.check_freq)
        self._track_schedule = parse_track_schedule(settings.track_freq)
        self._ledger, self._history = Ledger(), History((), {})
        self._recent: deque[StepRecord] = deque(maxlen=WINDOW_STEPS)
        self._check_log, self._costs, self._epochs = CheckLog(), Costs(), Epochs()
        self._actions = Actions(model, settings.stop_on, settings.action, retrace=retrace)
        self._fallback, self._suspects = Fallback(model), Suspects()
        self._before: Before | None = None
        self._holds_incidents = False
        self._weights: list[tuple[TensorInfo, Any]] = []
        self._rows: dict[int, int] = {}
        self._checker: Checker | None = None
        self._looks: Looks | None = None
        self._optimizer: Any = None
        self._probe: Batch | None = None
        self._check: CheckResult | None = None
        self._checks_due: set[int] = set()
        self._offset, self._steps, self._at, self._since_rules = 0, 0, 1, 0
        self._spent = (0.0, 0.0)
        self._opened, self._finished = False, False
        self._failed: set[str] = set()
        self._notes: list[str] = []

    def begin(self) -> None:
        """Look at the model before its first step."""
        if not isinstance(self._settings.probe, int):
            self._probe = arrays_of(batch_of(self._settings.probe))
            check_fits(self._model, self._probe)
        with self._guarded("capture"):
            self._describe()
            self._checker = Checker(self._model, surrogates=self._settings.surrogates)
        self._costs.begin()

    def begin_epoch(self, epoch: int) -> None:
        """The next step is the first of an epoch."""
        self._epochs.begin(epoch, start=self._steps + 1)
        self._actions.begin_epoch()
        if self._steps:
            return
        # Only now: another callback may have brought weights and optimizer back when training began.
        with self._guarded("capture"):
            self._offset = steps_done(self._model)
            self._looks = Looks(self._model, offset=self._offset)
            self._actions.keep(0, ())
            self._holds_incidents = self._settings.sinks.wants_incidents()

    def wants(self, step: int) -> Request:
        """What the coming step must provide."""
        first = step == self._epochs.start
        check = self._check_schedule.due(step, first) and "checks" not in self._failed
        (self._checks_due.add if check else self._checks_due.discard)(step)
        track = self._track_schedule.due(step, first)
        if self._fallback.since:
            return Request(batch=first or check or (track and self._fallback.is_due(step)))
        # A tracked step hands its batch over afterwards anyway: one that goes NaN is run again to find out why.
        return Request(track=track, batch=first or check or (track and self._holds_incidents))

    def before_step(self, step: int, batch: Any) -> None:
        """Check the gradients, if it is time, before the weights move."""
        self._at = step
        if self._checker is None:
            return
        if self._holds_incidents:
            with self._guarded("sinks"):
                self._before = Before.of(self._model)
        if step in self._checks_due:
            with self._guarded("checks"):
                self._check = self._checker.check(self._probe_of(batch), seed=self._settings.seed + self._offset + step)
                self._check_log.add(self._check)
        if self._looks is not None:
            with self._guarded("activations"):
                samples = Batch(*keras.utils.unpack_x_y_sample_weight(batch))
                self._looks.before_step(step, samples, due=step in self._checks_due)
        if self._fallback.is_due(step):
            with self._guarded("capture"):
                self._fallback.read(self._checker, self._probe_of(batch), rows=self._rows)

    def after_step(self, step: int, captured: CapturedStep | None) -> bool:
        """Record the step, and ask the rules when it is time.

        Returns:
            Whether the step was taken back.
        """
        self._steps = self._at = step
        self._checks_due.discard(step)
        self._tell_schedule()
        if captured is None and self._check is None and self._fallback.numbers is None:
            return False
        if self._looks is not None and captured is not None and captured.batch is not None:
            with self._guarded("activations"):
                self._looks.after_step(step, batch_seen(captured))
        rules_due = alarming = False
        with self._guarded("capture"):
            self._open()
            if captured is not None and not captured.variables and self._weights and not self._fallback.since:
                self._notes.append(self._fallback.begin(self._steps + 1))
            record = self._record(step, captured)
            self._keep(record)
            self._suspects.add(record, captured, self._before)
            self._since_rules += 1
            alarming = is_nonfinite(record) and not self._ledger.holds("nonfinite")
            rules_due = alarming or record.check is not None or self._since_rules >= RULE_EVERY
        self._check, self._fallback.numbers, self._before = None, None, None
        if step == self._epochs.start and not alarming:
            self._actions.keep_metrics()
        return rules_due and self._act(self._ask_rules())

    def end_epoch(self) -> dict[str, float]:
        """The three keys for the logs of the epoch that ends."""
        logs = self._epochs.logs
        self._epochs.end()
        if self._looks is not None:
            with self._guarded("activations"):
                self._looks.end_epoch(self._steps)
        self._act(self._ask_rules())
        with self._guarded("sinks"):
            self._settings.sinks.sum_up(self._account())
        self._complain()
        first = self._offset + self._epochs.start
        return {**logs, "grad_findings": float(sum(f.last_step >= first for f in self._ledger.findings))}

    def end(self) -> None:
        """Close the books."""
        self._act(self._ask_rules(ended=True), ended=True)
        self._finish()

    def frame(self) -> pd.DataFrame:
        """The history so far; its ``attrs`` hold the rest of the account, for reports from a file."""
        self._history.set_findings(self._ledger.findings)
        frame = self._history.to_frame()
        frame.attrs.update(self._account())
        return frame

    @property
    def records(self) -> Sequence[StepRecord]:
        """The last sampled steps, oldest first."""
        return tuple(self._recent)

    @property
    def findings(self) -> Sequence[Finding]:
        """The findings so far."""
        return self._ledger.findings

    def findings_frame(self) -> pd.DataFrame:
        """The findings so far, one row each."""
        import pandas as pd

        columns = [field.name for field in fields(Finding) if field.name not in ("tensors", "explains", "samples")]
        return pd.DataFrame([[getattr(f, c) for c in columns] for f in self._ledger.findings], columns=columns)

    def cost(self) -> dict[str, float]:
        """Seconds and shares of the training time."""
        return self._costs.account()

    def summary(self) -> str:
        """Text for a terminal."""
        from keras_gradwatch.summary import summarize

        checks = tuple(self._check_log.results)
        tensors = checks[0].tensors if checks else tuple(info for info, _ in self._weights)
        share, training = (self.cost()[key] if self._steps else float("nan") for key in ("share", "training_seconds"))
        return summarize(
            steps=self._steps, tensors=tensors, findings=self._ledger.findings, checks=checks,
            num_checks=self._check_log.count, cost_share=share, cost_seconds=share * training, notes=self._all_notes(),
        )  # fmt: skip

    # -- what happens inside -------------------------------------------------------------------------------------------

    @contextmanager
    def _guarded(self, part: str, *, once: bool = False) -> Iterator[None]:
        """Time a part of the watcher; its failure is told once and never reaches training."""
        try:
            with self._costs.timed(part if part in self._costs.seconds else "capture", once=once):
                yield
        except Exception as error:  # noqa: BLE001  training must not break because of the watcher
            self._fail(part, error)

    def _tell_schedule(self) -> None:
        """Seconds of checks and of training since the last step."""
        checks, training = self._spent
        self._spent = self._costs.seconds["checks"], self._costs.training_seconds
        self._check_schedule.record(self._spent[0] - checks, self._spent[1] - training)

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

    def _complain(self) -> None:
        if complaint := self._costs.complaint():
            self._notes.append(complaint)
            warnings.warn(f"{complaint}.", RuntimeWarning, stacklevel=user_stacklevel(sys._getframe()))

    def _probe_of(self, data: Any) -> Batch:
        if self._probe is not None:
            return self._probe
        count = fixed_batch_size(self._model) or self._settings.probe
        return Batch(*keras.utils.unpack_x_y_sample_weight(data)).head(count)

    def _record(self, step: int, captured: CapturedStep | None) -> StepRecord:
        count = len(self._weights)
        statistics, connected, loss = np.full((count, len(STATISTICS)), np.nan), np.ones(count, dtype=bool), None
        if self._fallback.numbers is not None:
            statistics, connected, loss = self._fallback.numbers
        elif captured is not None and captured.variables:
            places = [self._rows.get(id(variable), -1) for variable in captured.variables]
            known = [k for k, place in enumerate(places) if place >= 0]
            rows = [places[k] for k in known]
            statistics[rows] = captured.statistics[known]
            connected[rows] = np.asarray(captured.connected)[known]
        if captured is not None:
            loss = captured.loss
        record = StepRecord(
            step=self._offset + step, epoch=self._epochs.epoch, loss=loss, statistics=statistics, connected=connected,
            learning_rate=self._learning_rate(captured), check=self._check,
        )  # fmt: skip
        if is_harmful(record) and not self._ledger.holds("nonfinite"):
            with self._guarded("checks", once=True):
                return replace(record, culprits=self._diagnose(captured))
        return record

    def _learning_rate(self, captured: CapturedStep | None) -> float:
        """Of the optimizer that moves the first of the weights, found once it has done so."""
        if self._optimizer is None and captured is not None and captured.variables:
            self._optimizer = leading_optimizer(self._model, captured.variables)
        return learning_rate(self._optimizer or getattr(self._model, "optimizer", None))

    def _diagnose(self, captured: CapturedStep | None) -> tuple[Culprit, ...]:
        """Run the batch that went NaN again, with the weights from before the step."""
        if captured is None or captured.batch is None or captured.previous_weights is None or self._checker is None:
            return ()
        return self._checker.diagnose(batch_seen(captured), weights_before(captured))

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
        with self._costs.timed("sinks"):
            self._settings.sinks.open((*tensors, *inputs), self._attributes())
            self._holds_incidents = self._settings.sinks.wants_incidents()

    def _keep(self, record: StepRecord) -> None:
        self._recent.append(record)
        self._history.append(record)
        self._epochs.add(record)
        with self._costs.timed("sinks"):
            self._settings.sinks.write(record)

    def _ask_rules(self, *, ended: bool = False) -> tuple[Finding, ...]:
        self._since_rules = 0
        if (self._recent or (self._looks is not None and self._looks.records)) and "rules" not in self._failed:
            with self._guarded("rules"):
                window = self._window(ended=ended)
                found = [finding for rule in self._settings.rules for finding in rule(window)]
                new = self._ledger.update(found, self._offset + self._steps)
                for finding in new:
                    self._history.keep_around(finding.first_step)
                suspects = self._suspects.take()
                new = tuple(self._with_sample(finding, suspects.largest) for finding in new)
                for finding in new if self._holds_incidents else ():
                    self._report_incident(finding, suspects.of(finding))
                return new
        return ()

    def _report_incident(self, finding: Finding, suspect: Suspect | None) -> None:
        """Hand the step over to the sinks that keep incidents."""
        if suspect is None or suspect.before is None:
            return
        incident = StepIncident(
            model=self._model, finding=finding, before=suspect.before, data=suspect.data, probe=self._probe,
            probe_size=self._settings.probe if self._probe is None else 0, seed=self._settings.seed,
            surrogates=self._settings.surrogates, record=suspect.record,
            rows=[record for record in self._recent if record.step < suspect.record.step][-ROWS_BEFORE:],
            tensors=tuple(info for info, _ in self._weights), attributes=self._attributes(),
        )  # fmt: skip
        with self._costs.timed("sinks"):
            self._settings.sinks.incident(finding, incident)
        self._holds_incidents = self._settings.sinks.wants_incidents()

    def _with_sample(self, finding: Finding, suspect: Suspect | None) -> Finding:
        """Name the one sample that makes gradients explode, if one does."""
        if finding.finding != "exploding" or suspect is None or not suspect.weights or self._checker is None:
            return finding
        with self._guarded("checks", once=True):
            if dominant := self._checker.dominant_sample(suspect.batch, suspect.weights):
                row, share = dominant
                words = f"at step {suspect.record.step} {row_words([row])} makes {share:.0%} of the gradient"
                return self._ledger.amend(finding, words, samples=(row,))
        return finding

    def _window(self, *, ended: bool) -> Window:
        return window_of(
            list(self._recent), tuple(info for info, _ in self._weights), epochs=self._epochs,
            looks=self._looks.records if self._looks is not None else (),
            planned_steps=planned_steps(self._model, self._steps, len(self._epochs.losses)), ended=ended,
        )  # fmt: skip

    def _act(self, new: Sequence[Finding], *, ended: bool = False) -> bool:
        """Tell the world about new findings, and do what the user asked for; True when the step was taken back."""
        for finding in new:
            self._say(f"step {finding.first_step} · {finding.severity} · {finding.message}")
            with self._costs.timed("sinks"):
                self._settings.sinks(finding)
        deed = None
        with self._guarded("actions"):
            deed = self._actions.answer(new, step=self._steps, offset=self._offset, ended=ended)
            if deed is None:
                self._actions.keep(self._steps, self._ledger.active)
        if deed is None:
            return False
        if deed.action == "raise":
            error = error_of(deed.finding, self._check_log.results[-1] if self._check_log.results else None)
            self._finish()
            self._release()
            raise error
        self._say(deed.words)
        if deed.restored:
            self._ledger.amend(deed.finding, deed.words.partition(", ")[2])
            self._forget()
        return deed.restored

    def _forget(self) -> None:
        """What was seen since the healthy state belongs to another course: the rules start afresh."""
        self._ledger.close(self._settings.stop_on)
        self._recent.clear()
        self._suspects.take()
        self._epochs.forget()
        if self._looks is not None:
            self._looks.forget()

    def _say(self, words: str) -> None:
        if self._settings.verbose:
            print(f"\nGradWatch · {words}")  # noqa: T201

    def _finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        self._costs.end()
        restore_schedules(self._model)
        self._checker = None
        if self._looks is not None and self._looks.failure:
            self._notes.append(f"activations could not be looked at: {self._looks.failure}")
        self._looks = None
        with self._costs.timed("sinks"):
            if self._opened:
                self._settings.sinks.sum_up(self._account())
            self._settings.sinks.close()
        if self._settings.verbose:
            with self._guarded("summary"):
                print("", DisplayText(self.summary()), sep="\n")  # noqa: T201

    def _all_notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self._check_log.notes, *self._notes, *self._actions.notes)))

    def _account(self) -> dict[str, object]:
        """What the rows do not say, fit for JSON."""
        return {
            "findings": [_plain(finding) for finding in self._ledger.findings],
            "actions": self._actions.account(),
            "cost": self.cost(), "steps": self._steps,
            "gradients": "probe" if self._fallback.since else "training step",
            "notes": list(self._all_notes()),
            "layer_classes": {info.layer: info.layer_class for info, _ in self._weights},
            "reasons": dict(self._check_log.reasons),
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


def _plain(finding: Finding) -> dict[str, Any]:
    return {**asdict(finding), "tensors": list(finding.tensors)}
