"""The state of a model in training, copied to the host: weights, averages, seeds, optimizers, metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from keras_gradwatch.capture import optimizers_of
from keras_gradwatch.optimizers import host, inner_optimizer
from keras_gradwatch.probe import every_variable

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ModelState:
    """Every variable of a model and its optimizers, as they were at one step. Metrics and learning rates are apart.

    Attributes:
        step: the step after which it was taken, 0 for before the first.
        model: values of ``model_variables``, on the host.
        optimizers: values of ``optimizer_variables``, by ``id`` of the variable: optimizers may be built later.
    """

    step: int
    model: tuple[Array, ...]
    optimizers: dict[int, Array]

    @classmethod
    def of(cls, model: Any, *, step: int) -> ModelState:
        """A copy of the present state."""
        optimizer_values = {id(v): _copied(v) for each in optimizers_of(model) for v in optimizer_variables(each)}
        return cls(step, tuple(_copied(v) for v in model_variables(model)), optimizer_values)

    @property
    def is_finite(self) -> bool:
        """Whether no value is NaN or Inf."""
        return all(_is_finite(value) for value in (*self.model, *self.optimizers.values()))

    def fits(self, model: Any) -> bool:
        """False when the model was built only after the copy was made."""
        return len(self.model) == len(model_variables(model)) > 0

    def restore(self, model: Any) -> None:
        """Put the values back. An optimizer that was built after the copy is set back to how it begins."""
        for variable, value in zip(model_variables(model), self.model, strict=True):
            variable.assign(value)
        for optimizer in optimizers_of(model):
            variables = optimizer_variables(optimizer)
            if all(id(variable) in self.optimizers for variable in variables):
                values: Iterable[Any] = [self.optimizers[id(variable)] for variable in variables]
            else:
                values = _beginning(optimizer)
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)


def model_variables(model: Any) -> list[Any]:
    """Weights, averages, seed states and the like of a model; no metrics."""
    metrics = {id(variable) for variable in metric_variables(model)}
    return [variable for variable in every_variable(model) if id(variable) not in metrics]


def metric_variables(model: Any) -> list[Any]:
    """The variables of a model's metrics, the running loss among them."""
    return list(getattr(model, "metrics_variables", None) or [])


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Everything an optimizer keeps but its learning rate, which belongs to the user and to schedules."""
    rate = inner_optimizer(optimizer)._learning_rate
    return [variable for variable in optimizer.variables if variable is not rate]


def copies(variables: Sequence[Any]) -> list[Any]:
    """Values of variables as tensors that later steps do not change; nothing leaves the device."""
    return [keras.ops.copy(variable) for variable in variables]


def _copied(variable: Any) -> Array:
    return np.array(host(variable))  # on the CPU the conversion alone may share memory


def _is_finite(value: Array) -> bool:
    if value.dtype.kind in "biu":
        return True
    return bool(np.isfinite(value if value.dtype.kind == "f" else value.astype(np.float32)).all())


def _beginning(optimizer: Any) -> list[Array]:
    """Values of the optimizer's variables before its first step."""
    fresh = type(optimizer).from_config(optimizer.get_config())
    fresh.build(inner_optimizer(optimizer)._trainable_variables)
    return [_copied(variable) for variable in optimizer_variables(fresh)]
