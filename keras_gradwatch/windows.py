"""The last steps of a run as rules see them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keras_gradwatch.epochs import Epochs
from keras_gradwatch.records import STATISTICS, ActivationRecord, StepRecord, TensorInfo, Window


def window_of(
    records: Sequence[StepRecord],
    tensors: tuple[TensorInfo, ...],
    *,
    epochs: Epochs,
    looks: Sequence[ActivationRecord] = (),
    planned_steps: int = 0,
    ended: bool = False,
) -> Window:
    """A window over these records.

    Args:
        records: oldest first; may be empty.
        tensors: the weights, in the order of the records' statistics.
        epochs: the books of the run.
        looks: the last looks at the activations, oldest first.
        planned_steps: steps that the run will take, 0 when unknown.
        ended: no step will follow.
    """
    checked = [record for record in records if record.check is not None]
    shape = (len(records), len(tensors), len(STATISTICS))
    return Window(
        tensors=tensors,
        steps=np.array([r.step for r in records], dtype=np.int64),
        epochs=np.array([r.epoch for r in records], dtype=np.int64),
        losses=np.array([np.nan if r.loss is None else r.loss for r in records]),
        loss_known=np.array([r.loss is not None for r in records], dtype=bool),
        learning_rates=np.array([r.learning_rate for r in records]),
        statistics=np.array([r.statistics for r in records]).reshape(shape),
        connected=np.array([r.connected for r in records], dtype=bool).reshape(shape[:2]),
        check=checked[-1].check if checked else None,
        check_step=checked[-1].step if checked else 0,
        culprits=next((r.culprits for r in records if r.culprits), ()),
        activations=tuple(looks),
        epoch_losses=np.array(epochs.losses),
        epoch_noise=np.array(epochs.noise),
        planned_steps=planned_steps,
        ended=ended,
    )
