"""torch modules inside a Keras model: Keras leaves them alone when it swaps values, so they are bound here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def modules_bound() -> Iterator[None]:
    """While open, a wrapped torch module computes with the values of the stateless scope in which it is called.

    Its parameters are those of the scope, and its buffers (running averages) are copies: nothing of it moves.
    """
    import keras
    from keras.src.backend.common.stateless_scope import in_stateless_scope

    wrapper = keras.layers.TorchModuleWrapper
    original = wrapper.call

    def call(self: Any, *args: Any, training: Any = None, **kwargs: Any) -> Any:
        if not in_stateless_scope():
            return original(self, *args, training=training, **kwargs)
        self.train(training is not False)
        return torch.func.functional_call(self.module, _state_of(self), args, kwargs)

    wrapper.call = call
    try:
        yield
    finally:
        wrapper.call = original


def _state_of(layer: Any) -> dict[str, Any]:
    """Parameters as the scope has them, and copies of the buffers in the same float dtype."""
    values = {id(variable._value): variable.value for variable in layer.variables}
    dtype = next((value.dtype for value in values.values() if value.is_floating_point()), torch.get_default_dtype())
    named = layer.module.named_parameters(remove_duplicate=False)
    state = {name: values.get(id(parameter), parameter) for name, parameter in named}
    for name, buffer in layer.module.named_buffers(remove_duplicate=False):
        state[name] = buffer.detach().to(dtype if buffer.is_floating_point() else buffer.dtype, copy=True)
    return state
