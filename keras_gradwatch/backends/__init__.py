"""One adapter per backend. Nothing outside this folder knows which one runs."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

_SUPPORTED = ("tensorflow", "jax", "torch")


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


def undisturbed() -> AbstractContextManager[None]:
    """A context in which a model's code may run outside of a program and leave no trace that Keras does not clear."""
    import keras

    if keras.backend.backend() != "torch":
        return nullcontext()
    from keras_gradwatch.backends import torch_graph

    return torch_graph.undisturbed()


def _module(part: str) -> ModuleType:
    import keras

    name = keras.backend.backend()
    if name not in _SUPPORTED:
        raise NotImplementedError(
            f"Keras runs on the {name!r} backend. Expected one of {', '.join(_SUPPORTED)}. "
            f"Set KERAS_BACKEND={_SUPPORTED[0]} before importing keras."
        )
    if name == "jax" and keras.config.is_nnx_enabled():
        raise NotImplementedError(
            "Keras runs in its NNX mode. Expected plain JAX, where a training step can be watched. "
            "Unset KERAS_NNX_ENABLED before importing keras."
        )
    return importlib.import_module(f"keras_gradwatch.backends.{name}_{part}")
