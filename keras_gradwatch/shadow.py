"""The float64 shadow: while it is open, a model's own code traces in float64. Nothing is copied, all is put back.

Keras decides dtypes in seven places (measured on Keras 3.15, see ``docs/architecture.md``): layer policies, the dtypes
of functional inputs, variables, loss objects, ``floatx``, type promotion, and the random functions. All are switched
here, under one lock, for as short as tracing takes; where nothing is traced, around every run. A second thread that
builds Keras models meanwhile would see float64.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from keras_gradwatch.backends import program_backend

_LOCK = threading.RLock()


@contextmanager
def float64_shadow(layers: list[Any], losses: list[Any], variables: list[Any]) -> Iterator[None]:
    """Make ``layers``, ``losses`` and ``variables`` compute in float64 inside the ``with`` block.

    Args:
        layers: every layer involved, the model itself included; quantised layers are refused.
        losses: every ``keras.Loss`` object involved.
        variables: every variable involved, trainable or not.

    Raises:
        TypeError: a layer holds quantised weights, which have no float64 form.
    """
    import keras
    from keras.src.backend.common.dtypes import BIT64_TO_BIT32_DTYPE  # what type promotion does to float64

    for layer in layers:
        if getattr(layer, "quantization_mode", None) is not None:
            raise TypeError(f"layer {layer.path} is quantised ({layer.quantization_mode}): it has no float64 form")
    with _LOCK, ExitStack() as stack:
        policy = keras.DTypePolicy("float64")
        for layer in layers:
            _replace(stack, layer, "_dtype_policy", policy)
            if isinstance(layer, keras.layers.InputLayer) and "float" in str(layer._dtype):
                _replace(stack, layer, "_dtype", "float64")
            for symbolic in _functional_inputs(layer):
                if "float" in str(symbolic._dtype):
                    _replace(stack, symbolic, "_dtype", "float64")
        for loss in losses:
            _replace(stack, loss, "_dtype", "float64")
        for variable in variables:
            # Variable.assign casts to the variable's own dtype: SpectralNormalization assigns its kernel in the call.
            if "float" in str(variable.dtype):
                _replace(stack, variable, "_dtype", "float64")
        stack.callback(keras.config.set_floatx, keras.config.floatx())
        keras.config.set_floatx("float64")
        stack.callback(BIT64_TO_BIT32_DTYPE.__setitem__, "float64", BIT64_TO_BIT32_DTYPE["float64"])
        BIT64_TO_BIT32_DTYPE["float64"] = "float64"
        _draw_in_float32(stack)
        yield


def losses_of(model: Any) -> list[Any]:
    """Every ``keras.Loss`` object inside a compiled model, each once."""
    import keras

    found: list[Any] = []

    def visit(value: Any) -> None:
        if isinstance(value, keras.losses.Loss) and not any(value is seen for seen in found):
            found.append(value)
            for child in vars(value).values():
                visit(child)
        elif isinstance(value, list | tuple):
            for child in value:
                visit(child)
        elif isinstance(value, dict):
            for child in value.values():
                visit(child)

    visit(getattr(model, "_compile_loss", None))
    visit(getattr(model, "loss", None))
    return found


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute past Keras' tracking ``__setattr__`` and have it put back when the stack closes."""
    missing = object()
    before = vars(owner).get(name, missing)

    def restore() -> None:
        if before is missing:
            vars(owner).pop(name, None)
        else:
            vars(owner)[name] = before

    stack.callback(restore)
    vars(owner)[name] = value


def _functional_inputs(layer: Any) -> list[Any]:
    import keras

    if not isinstance(layer, keras.Model):
        return []
    function = getattr(layer, "_functional", None) or layer  # Sequential keeps its graph in _functional
    return list(getattr(function, "_inputs", None) or [])


def _draw_in_float32(stack: ExitStack) -> None:
    """Let random functions draw in float32 and cast, so that float64 sees the very masks the training step saw."""
    from keras.src.backend import random as backend_random

    in_float32 = program_backend().in_float32

    def drawing(name: str, spread: Callable[[Any, Any], Any]) -> None:
        original = getattr(backend_random, name)
        standard = inspect.signature(original).parameters
        first, second = list(standard)[1:3]  # (mean, stddev) or (minval, maxval)

        def draw(shape: Any, *args: Any, dtype: Any = None, seed: Any = None, **kwargs: Any) -> Any:
            import keras

            if dtype is not None and "float" not in str(keras.backend.standardize_dtype(dtype)):
                return original(shape, *args, dtype=dtype, seed=seed, **kwargs)
            settings = dict(zip((first, second), args, strict=False)) | kwargs
            low = settings.get(first, standard[first].default)
            high = settings.get(second, standard[second].default)
            with in_float32():
                unit = original(shape, dtype="float32", seed=seed)
            unit = keras.ops.cast(unit, "float64")
            return keras.ops.cast(low + spread(low, high) * unit, dtype or "float64")

        stack.callback(setattr, backend_random, name, original)
        setattr(backend_random, name, draw)

    drawing("normal", lambda mean, stddev: stddev)
    drawing("truncated_normal", lambda mean, stddev: stddev)
    drawing("uniform", lambda low, high: high - low)
    dropout = backend_random.dropout

    def float64_dropout(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
        import keras

        # ones_like, since torch draws in the order in which the input lies in memory.
        with in_float32():
            kept = dropout(keras.ops.ones_like(inputs, dtype="float32"), rate, noise_shape, seed)
        scale = 1.0 / (1.0 - rate) if rate < 1.0 else 0.0
        return keras.ops.where(keras.ops.not_equal(kept, 0.0), inputs * scale, keras.ops.zeros_like(inputs))

    stack.callback(setattr, backend_random, "dropout", dropout)
    backend_random.dropout = float64_dropout
