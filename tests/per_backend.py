"""What tests need and Keras does not offer on every backend: hand-written gradients, native operations, arrays."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

BACKEND = keras.backend.backend()


def only(*backends: str, reason: str) -> pytest.MarkDecorator:
    """Skip on every other backend, with the reason."""
    return pytest.mark.skipif(BACKEND not in backends, reason=f"{' and '.join(backends)} only: {reason}")


def ours(caught: Any) -> list[Any]:
    """The warnings of ours among those caught: NumPy deprecates what PyTorch tensors do, and says so many times."""
    return [warning for warning in caught if warning.category is RuntimeWarning]


def array(value: Any) -> np.ndarray:
    """A variable or tensor as a NumPy array of its own."""
    return np.array(ops.convert_to_numpy(value))


def dtype_name(value: Any) -> str:
    """``"float32"`` and so on."""
    return str(keras.backend.standardize_dtype(value.dtype))


def planted(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """An operation with a hand-written gradient: ``backward(upstream, *inputs)`` gives one per input."""

    @ops.custom_gradient
    def operation(*inputs: Any) -> Any:
        inputs = tuple(ops.convert_to_tensor(x) for x in inputs)

        def gradient(*args: Any, upstream: Any = None) -> Any:
            found = backward(args[0] if upstream is None else upstream, *inputs)
            return tuple(found) if len(inputs) > 1 else found[0]

        return forward(*inputs), gradient

    return operation


def wrong_by(factor: float) -> Callable[[Any], Any]:
    """The identity with a backward pass that is wrong by a factor."""
    # × 1: torch refuses to give an input back as it came.
    return planted(lambda x: x * 1, lambda upstream, x: [factor * upstream])


def nested(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled by itself, as the backend does it."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(function)
    if BACKEND == "jax":
        import jax

        return jax.jit(function)
    return function


def native_normal(like: Any) -> Any:
    """Random numbers in the form of a tensor, drawn by the backend's own function, past Keras' seeds."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.random.normal(tf.shape(like), dtype=like.dtype)
    if BACKEND == "torch":
        import torch

        return torch.randn_like(like)
    raise NotImplementedError("JAX draws nothing without a key")
