"""Find wrong, dead, vanishing and exploding gradients while a Keras 3 model trains.

The public names are loaded when they are first used: importing the package loads neither Keras nor a backend.

Example:
    >>> import keras_gradwatch
    >>> "check_gradients" in dir(keras_gradwatch)
    True
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras_gradwatch.callback import GradWatch
    from keras_gradwatch.checks import check_gradients, check_layer
    from keras_gradwatch.errors import GradientCheckError, GradientError, NonFiniteGradientError
    from keras_gradwatch.history import read_history
    from keras_gradwatch.jacobian import compute_gradient, compute_gradient_error
    from keras_gradwatch.replays import replay_incident
    from keras_gradwatch.rollbacks import Rollback
    from keras_gradwatch.sinks import (
        CSVSink,
        IncidentSink,
        LivePlot,
        MLflowSink,
        ParquetSink,
        TensorBoardSink,
        TrackioSink,
        WandbSink,
    )

__version__ = "0.1.0"

__all__ = [
    "CSVSink",
    "GradWatch",
    "GradientCheckError",
    "GradientError",
    "IncidentSink",
    "LivePlot",
    "MLflowSink",
    "NonFiniteGradientError",
    "ParquetSink",
    "Rollback",
    "TensorBoardSink",
    "TrackioSink",
    "WandbSink",
    "check_gradients",
    "check_layer",
    "compute_gradient",
    "compute_gradient_error",
    "read_history",
    "replay_incident",
]

#: Module that defines each public name.
_MODULES = {
    "CSVSink": "sinks",
    "GradWatch": "callback",
    "GradientCheckError": "errors",
    "GradientError": "errors",
    "IncidentSink": "sinks",
    "LivePlot": "sinks",
    "MLflowSink": "sinks",
    "NonFiniteGradientError": "errors",
    "ParquetSink": "sinks",
    "Rollback": "rollbacks",
    "TensorBoardSink": "sinks",
    "TrackioSink": "sinks",
    "WandbSink": "sinks",
    "check_gradients": "checks",
    "check_layer": "checks",
    "compute_gradient": "jacobian",
    "compute_gradient_error": "jacobian",
    "read_history": "history",
    "replay_incident": "replays",
}


def __getattr__(name: str) -> object:
    """Load a public name on first use and keep it (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Everything there is, loaded or not."""
    return sorted({*globals(), *__all__})
