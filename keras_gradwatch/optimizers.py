"""What the watcher reads of the optimizers of a model, and how it cuts their learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from keras_gradwatch.capture import optimizers_of


def steps_done(model: Any) -> int:
    """Steps the model's optimizer has taken, each micro-batch of an accumulation counted."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not optimizer.built:
        return 0
    inner = inner_optimizer(optimizer)
    return int(host(inner.iterations)) * (inner.gradient_accumulation_steps or 1)


def planned_steps(model: Any, steps: int, epochs: int) -> int:
    """Steps that ``fit`` is going to run; 0 while nobody knows."""
    plan = getattr(getattr(model, "history", None), "params", None) or {}
    per_epoch = plan.get("steps") or (steps / epochs if epochs else 0)
    return int(per_epoch * (plan.get("epochs") or 0))


def leading_optimizer(model: Any, variables: Sequence[Any]) -> Any:
    """The optimizer whose learning rate stands for a step: the one that moves the first of ``variables``.

    A model with several optimizers of its own, such as a GAN, has a ``model.optimizer`` besides that moves nothing.
    """
    optimizers = optimizers_of(model)
    for variable in variables:
        for optimizer in optimizers:
            if any(variable is own for own in inner_optimizer(optimizer)._trainable_variables):
                return optimizer
    return getattr(model, "optimizer", None)


def learning_rate(optimizer: Any) -> float:
    """The learning rate of now; NaN without an optimizer."""
    return float("nan") if optimizer is None else float(host(optimizer.learning_rate))


def host(value: Any) -> npt.NDArray[Any]:
    """A tensor or variable as an array, which may share its memory."""
    tensor = keras.ops.convert_to_tensor(value)
    try:
        return np.asarray(tensor)
    except (RuntimeError, TypeError):  # torch: on another device, or part of a graph
        return np.asarray(keras.ops.convert_to_numpy(tensor))  # makes NumPy 2 warn on TensorFlow (seen in Keras 3.15)


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer that a LossScaleOptimizer wraps; any other one itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def cut_learning_rate(optimizer: Any, factor: float) -> bool:
    """Multiply the learning rate, which is a variable, or what its schedule gives.

    A schedule cannot be assigned to: its value is multiplied on the way out, without touching the schedule, until
    :func:`restore_schedules`. A compiled step has the schedule inside it and must be traced again to see this.

    Returns:
        Whether a step must be traced again.
    """
    inner = inner_optimizer(optimizer)
    if isinstance(inner._learning_rate, keras.Variable):
        inner.learning_rate = learning_rate(inner) * factor
        return False
    current = inner._get_current_learning_rate
    # Into the dictionary, past attribute tracking; Keras saves the configuration only, so nothing of it is saved.
    inner.__dict__["_get_current_learning_rate"] = lambda: current() * factor
    return True


def restore_schedules(model: Any) -> None:
    """Let every schedule speak for itself again."""
    for optimizer in optimizers_of(model):
        inner_optimizer(optimizer).__dict__.pop("_get_current_learning_rate", None)
