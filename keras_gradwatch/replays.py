"""``replay_incident``: one step run again from its folder, and whether the same comes out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_gradwatch.archives import read_arrays, read_json, unpack
from keras_gradwatch.callback import GradWatch
from keras_gradwatch.capture import optimizers_of
from keras_gradwatch.checks import Checker
from keras_gradwatch.halving import row_words
from keras_gradwatch.incidents import FORMAT_VERSION, numbers_of, versions
from keras_gradwatch.optimizers import steps_done
from keras_gradwatch.probe import Batch, build_loss, build_model
from keras_gradwatch.records import STATISTICS, Finding
from keras_gradwatch.states import model_variables

if TYPE_CHECKING:
    import pandas as pd

#: Bytes that the arrays of an incident may hold.
MOST_BYTES = 64 * 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What came out when a step was run again; prints as a summary.

    Attributes:
        finding: what was found when the step first ran.
        findings: what is found in the step now. A step alone does not explode: that shows in the course of many.
        same: every number is the same to the last bit.
        frame: one row per number that was measured: tensor, number, then, now, same.
        notes: what may explain a difference, and what could not be restored.
        samples: rows of the batch at fault, as found now.
    """

    finding: Finding
    findings: tuple[Finding, ...]
    same: bool
    frame: pd.DataFrame
    notes: tuple[str, ...] = ()
    samples: tuple[int, ...] = ()

    @property
    def shows_again(self) -> bool:
        """Whether the step goes wrong again: the same finding on the same layer, or the same exploding numbers."""
        if self.finding.finding == "exploding":
            return self.same
        return any((f.finding, f.layer) == (self.finding.finding, self.finding.layer) for f in self.findings)

    def __str__(self) -> str:
        then = self.finding
        lines = [f"then: step {then.first_step}, {then.finding} in {then.layer}: {then.message}"]
        lines += [f"now:  {f.finding} in {f.layer}: {f.message}" for f in self.findings] or ["now:  nothing is found"]
        if self.samples:
            lines.append(f"samples at fault: {row_words(self.samples)}")
        count, equal = len(self.frame), int(self.frame["same"].sum())
        exactly = f"all {count} numbers are the same to the last bit"
        lines.append(exactly if self.same else f"{equal} of {count} numbers are the same")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def replay_incident(
    folder: str | os.PathLike[str], *, model: Any = None, custom_objects: Mapping[str, Any] | None = None
) -> Replay:
    """Runs the step of an incident again, in this process, and compares every number with those of the run.

    Args:
        folder: one that ``IncidentSink`` wrote. Nothing in it is executed: the model is loaded in Keras' safe mode.
        model: the model itself, built and compiled by your own code, for when the saved one cannot be loaded: a custom
            ``train_step``, a custom ``compile``, a lambda. Its weights and optimizer state are replaced.
        custom_objects: classes and functions by name, for a saved model that needs some; registering them with
            ``keras.saving.register_keras_serializable`` before does as well.

    Returns:
        What came out. On the machine and with the versions of the run, the numbers are the same to the last bit.

    Raises:
        OSError: a file cannot be opened.
        ValueError: the folder holds no incident, or its model cannot be loaded.
    """
    path = Path(folder)
    content = _content_of(path)
    values = read_arrays(path / "state.npz", most_bytes=MOST_BYTES)
    state = {part: unpack(content["state"].get(part), values) for part in ("model", "optimizers")}
    arrays = read_arrays(path / "batch.npz", most_bytes=MOST_BYTES)
    data, probe = unpack(content["batch"], arrays), unpack(content["probe"], arrays)
    if model is None:
        model = _loaded(path / "model.keras", content, custom_objects)
    batch = Batch(*keras.utils.unpack_x_y_sample_weight(data))
    build_model(model, batch)
    build_loss(model, batch)
    notes = _restore(model, state)
    notes += [f"{name} was {then}, is {versions().get(name)}" for name, then in content["versions"].items()
              if versions().get(name) != then]  # fmt: skip
    before = {id(v): np.array(value) for v, value in zip(model_variables(model), state["model"], strict=True)}
    watch = _run_again(model, data, probe, content)
    frame = _compared(content, numbers_of(watch.records[-1]))
    findings = tuple(watch.list_findings())
    samples = next((f.samples for f in findings if f.samples), ())
    if not samples and content["finding"]["finding"] == "exploding":
        dominant = Checker(model).dominant_sample(batch, before)
        samples = (dominant[0],) if dominant else ()
    return Replay(
        finding=_finding(content["finding"]), findings=findings, same=bool(frame["same"].all()), frame=frame,
        notes=tuple(notes), samples=samples,
    )  # fmt: skip


def _content_of(path: Path) -> dict[str, Any]:
    content = read_json(path / "incident.json")
    needed = ("format", "finding", "step", "seed", "tensors", "numbers", "batch", "state", "versions", "probe_size")
    if not isinstance(content, dict) or any(name not in content for name in needed):
        raise ValueError(f"{os.fspath(path)!r} holds no incident. Expected a folder that IncidentSink wrote.")
    if content["format"] != FORMAT_VERSION:
        raise ValueError(
            f"{os.fspath(path)!r} holds an incident of format {content['format']}. Expected {FORMAT_VERSION}. "
            "Use the version of keras_gradwatch that wrote it."
        )
    return content


def _loaded(path: Path, content: dict[str, Any], custom_objects: Mapping[str, Any] | None) -> Any:
    remedy = (
        "Register its classes with keras.saving.register_keras_serializable, or pass custom_objects={...}, or pass "
        "model=, built and compiled by your own code. state.npz and batch.npz can be read with numpy in any case."
    )
    if content.get("model_error"):
        raise ValueError(f"The model could not be saved: {content['model_error']}. {remedy}")
    with path.open("rb"):
        pass
    try:
        model = keras.saving.load_model(path, custom_objects=dict(custom_objects or {}), safe_mode=True)
    except Exception as error:
        text = str(error).strip().splitlines()
        raise ValueError(
            f"Could not load {os.fspath(path)!r} without running code from it: {type(error).__name__}: "
            f"{' '.join(text)[:400]}. {remedy}"
        ) from error
    if not model.compiled:
        raise ValueError(f"{os.fspath(path)!r} holds a model that comes back without its compile settings. {remedy}")
    return model


def _restore(model: Any, state: Mapping[str, Any]) -> list[str]:
    """Give the model its values from before the step; what could not be restored."""
    variables = model_variables(model)
    shapes = [tuple(variable.shape) for variable in variables]
    given = [np.shape(value) for value in state["model"]]
    if shapes != given:
        raise ValueError(
            f"Received a model with {len(shapes)} variables of the shapes {shapes[:4]} …. Expected {len(given)} of the "
            f"shapes {given[:4]} …. Build the model of the run."
        )
    for variable, value in zip(variables, state["model"], strict=True):
        variable.assign(value)
    notes = list[str]()
    for optimizer, values in zip(optimizers_of(model), state["optimizers"], strict=False):
        if not optimizer.built and values:
            optimizer.build(model.trainable_variables)
        if values and [tuple(v.shape) for v in optimizer.variables] == [np.shape(value) for value in values]:
            for variable, value in zip(optimizer.variables, values, strict=True):
                variable.assign(value)
        elif values:
            notes.append(f"the state of {optimizer.name} does not fit and was not restored: updates may differ")
    return notes


class _OneStep(GradWatch):
    """Watches the step that is run again."""

    @property
    def records(self) -> Sequence[Any]:
        return self._run.records

    def list_findings(self) -> Sequence[Finding]:
        return self._run.findings


def _run_again(model: Any, data: Any, probe: Any, content: dict[str, Any]) -> _OneStep:
    checked = content["numbers"]["check"] is not None
    watch = _OneStep(
        tuple(probe) if probe is not None else int(content["probe_size"]), check_freq="start" if checked else None,
        surrogates=content["surrogates"], verbose=0,
        # The check draws its directions from seed + step.
        seed=content["seed"] + content["step"] - steps_done(model) - 1,
    )  # fmt: skip

    def batches() -> Iterator[Any]:
        yield data

    model.steps_per_execution = 1
    model.stop_training = False
    model.fit(batches(), epochs=1, steps_per_epoch=1, shuffle=False, verbose=0, callbacks=[watch])
    return watch


def _compared(content: dict[str, Any], now: dict[str, Any]) -> pd.DataFrame:
    """Every number then and now."""
    import pandas as pd

    then = content["numbers"]
    rows = [("loss", "loss", _number(then["loss"]), _number(now["loss"]))]
    for (_, tensor), old, new in zip(content["tensors"], then["statistics"], now["statistics"], strict=True):
        rows += [(tensor, *row) for row in zip(STATISTICS, map(_number, old), map(_number, new), strict=True)]
    # By position: a model that the caller builds anew may have other names.
    for (tensor, *old), (_, *new) in zip(then["check"] or (), now["check"] or (), strict=True):
        names = ("check_error", "check_bar")
        rows += [(tensor, *row) for row in zip(names, map(_number, old), map(_number, new), strict=True)]
    frame = pd.DataFrame(rows, columns=["tensor", "number", "then", "now"])
    frame["same"] = (frame["then"] == frame["now"]) | (frame["then"].isna() & frame["now"].isna())
    return frame


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _finding(content: Mapping[str, Any]) -> Finding:
    plain: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
    }
    plain |= {name: _number(plain[name]) for name in ("value", "limit")}
    return Finding(**plain)
