"""Incidents: everything about one step that is needed to run it again, held while it runs and written when asked."""

from __future__ import annotations

import platform
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_gradwatch.archives import pack, write_arrays, write_json
from keras_gradwatch.capture import optimizers_of
from keras_gradwatch.errors import gist
from keras_gradwatch.files import write_history
from keras_gradwatch.history import History
from keras_gradwatch.optimizers import host
from keras_gradwatch.probe import Batch
from keras_gradwatch.records import CheckResult, Finding, StepRecord, TensorInfo
from keras_gradwatch.states import copies, model_variables

FORMAT_VERSION = 1

#: Rows before the step that are kept with it.
ROWS_BEFORE = 50


@dataclass(frozen=True, slots=True)
class Before:
    """A model as it was before a step; values on the device.

    Attributes:
        model: values of ``model_variables``.
        optimizers: values of all variables of each optimizer; empty for one that was not built yet.
    """

    model: list[Any]
    optimizers: list[list[Any]]

    @classmethod
    def of(cls, model: Any) -> Before:
        """The present state; later steps do not change it."""
        return cls(copies(model_variables(model)), [copies(each.variables) for each in optimizers_of(model)])

    def put(self, model: Any) -> None:
        """Give a model these values; what was built since keeps its own."""
        for variable, value in zip(model_variables(model), self.model, strict=False):
            variable.assign(value)
        for optimizer, values in zip(optimizers_of(model), self.optimizers, strict=False):
            if len(values) == len(optimizer.variables):
                for variable, value in zip(optimizer.variables, values, strict=True):
                    variable.assign(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepIncident:
    """One step that went wrong, as the :class:`~keras_gradwatch.sinks.incident.Incident` that a sink writes.

    Attributes:
        model: in training.
        finding: what was found.
        before: the model's state before the step.
        data: what ``train_step`` was given.
        probe: what was checked, if other than the head of the batch.
        probe_size: number of samples at the head of the batch that were checked.
        seed: of the callback.
        surrogates: of the callback.
        record: what was measured.
        rows: the records before it, oldest first.
        tensors: weights, in the order of the record's statistics.
        attributes: what ``history.attrs`` holds.
    """

    model: Any
    finding: Finding
    before: Before
    data: Any
    probe: Batch | None
    probe_size: int
    seed: int
    surrogates: tuple[str, ...]
    record: StepRecord
    rows: Sequence[StepRecord]
    tensors: tuple[TensorInfo, ...]
    attributes: dict[str, Any]

    @property
    def step(self) -> int:
        """Its number."""
        return self.record.step

    @property
    def num_bytes(self) -> int:
        """State, once in the model file and once by itself, and the batch."""
        state = sum(_num_bytes(v) for v in (*self.before.model, *(v for o in self.before.optimizers for v in o)))
        data = sum(_num_bytes(leaf) for leaf in keras.tree.flatten(self.data) if leaf is not None)
        return 2 * state + data

    def write(self, folder: Path) -> None:
        """Write ``incident.json``, ``model.keras``, ``state.npz``, ``batch.npz`` and ``rows.csv``."""
        trouble = self._write_model(folder / "model.keras")
        arrays = dict[str, Any]()
        batch = pack(_on_host(self.data), arrays, name="batch")
        probe = pack(_on_host(self.probe.parts), arrays, name="probe") if self.probe is not None else None
        write_arrays(folder / "batch.npz", arrays)
        arrays = {}
        state = {
            "model": pack(_on_host(self.before.model), arrays, name="model"),
            "optimizers": pack(_on_host(self.before.optimizers), arrays, name="optimizers"),
        }
        write_arrays(folder / "state.npz", arrays)
        self._write_rows(folder / "rows.csv")
        content = {
            "format": FORMAT_VERSION,
            "finding": asdict(self.finding),
            "step": self.record.step,
            "epoch": self.record.epoch,
            "seed": self.seed,
            "surrogates": list(self.surrogates),
            "probe_size": self.probe_size,
            "tensors": [[info.layer, info.tensor] for info in self.tensors],
            "numbers": numbers_of(self.record),
            "model_error": trouble,
            "batch": batch,
            "probe": probe,
            "state": state,
            "versions": versions(),
            "attributes": self.attributes,
        }
        write_json(folder / "incident.json", content)

    def _write_model(self, path: Path) -> str:
        """The model as it was; what was wrong if it cannot be saved."""
        now = Before.of(self.model)
        try:
            self.before.put(self.model)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.model.save(path)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  a model that Keras cannot save can still be given to the replay
            path.unlink(missing_ok=True)
            return gist(error)
        finally:
            now.put(self.model)
        return ""

    def _write_rows(self, path: Path) -> None:
        # Checks may hold inputs, which the rows of a plain history of weights do not.
        history = History(self.tensors, self.attributes)
        for record in (*self.rows, self.record):
            history.append(replace(record, check=None))
        history.set_findings([self.finding])
        write_history(history.to_frame(), path)


def numbers_of(record: StepRecord) -> dict[str, Any]:
    """What was measured at a step, fit for JSON and to the last bit."""
    return {
        "loss": record.loss,
        "statistics": record.statistics.tolist(),
        "connected": [bool(flag) for flag in record.connected],
        "check": _check_numbers(record.check),
    }


def versions() -> dict[str, str]:
    """Of everything that decides which numbers come out, the machine included."""
    from keras_gradwatch import __version__

    backend = keras.backend.backend()
    return {
        "keras_gradwatch": __version__,
        "keras": keras.__version__,
        "backend": f"{backend} {getattr(sys.modules.get(backend), '__version__', '')}".strip(),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }


def _check_numbers(check: CheckResult | None) -> list[list[Any]] | None:
    return None if check is None else [[row.tensor, row.error, row.bar] for row in check.checks]


def _on_host(tree: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else host(leaf), tree)


def _num_bytes(value: Any) -> int:
    return int(np.prod(np.shape(value), dtype=np.int64)) * np.dtype(_size_dtype(value)).itemsize


def _size_dtype(value: Any) -> str:
    name = keras.backend.standardize_dtype(value.dtype)
    return "float16" if name == "bfloat16" else name
