"""One adapter per backend. Nothing outside this folder knows which one runs."""

from __future__ import annotations

import importlib
from types import ModuleType


def program_backend() -> ModuleType:
    """The module that traces losses and gradients of models for the running Keras backend.

    Raises:
        NotImplementedError: the backend is not supported yet.
    """
    return _module("program")


def step_backend() -> ModuleType:
    """The module that runs a training step so that its gradients are seen, for the running Keras backend.

    Raises:
        NotImplementedError: the backend is not supported yet.
    """
    return _module("step")


def forward_backend() -> ModuleType:
    """The module that reads activations from a forward pass for the running Keras backend.

    Raises:
        NotImplementedError: the backend is not supported yet.
    """
    return _module("forward")


def function_backend() -> ModuleType:
    """The module that takes Jacobians of plain functions for the running Keras backend.

    Raises:
        NotImplementedError: the backend is not supported yet.
    """
    return _module("function")


def _module(part: str) -> ModuleType:
    import keras

    name = keras.backend.backend()
    if name != "tensorflow":
        raise NotImplementedError(
            f"Keras runs on the {name!r} backend. Expected 'tensorflow', the only one supported yet. "
            "Set KERAS_BACKEND=tensorflow before importing keras."
        )
    return importlib.import_module(f"keras_gradwatch.backends.{name}_{part}")
