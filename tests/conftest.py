import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    import pandas as pd

# Before anything imports Keras or a backend. xdist runs one process per core, so each keeps its thread pools small.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
for pool in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(pool, "1")

# The same examples every time, without a database of failures in the clone, and no stopwatch on a shared machine.
settings.register_profile("reproducible", derandomize=True, database=None, deadline=None)
settings.load_profile("reproducible")


def _run(
    *, layers: int = 3, steps: int = 20, broken_at: int = 0, names: Callable[[int], str] = "dense_{}".format,
    wrong: int | None = None, checks: bool = True, findings: tuple[Any, ...] = (), seed: int = 0, **attributes: Any,
) -> "pd.DataFrame":  # fmt: skip
    """A history frame like that of a run: a kernel and a bias per layer, gradients ten times weaker per layer.

    Tensor 0 is the input, 1 the first kernel. ``wrong`` is the one that every check, at steps 1, 11, …, finds wrong.
    """
    # Here, since importing NumPy before the settings above would fix the number of threads.
    from dataclasses import asdict

    import numpy as np

    from keras_gradwatch.history import History
    from keras_gradwatch.records import CheckResult, StepRecord, TensorCheck, TensorInfo

    image = TensorInfo(layer="image", tensor="image", role="input", depth=0, shape=(8, 4))
    kinds = [(i, own, shape) for i in range(layers) for own, shape in (("kernel", (4, 4)), ("bias", (4,)))]
    weights = [
        TensorInfo(layer=names(i), tensor=f"model/{names(i)}/{own}", role="weight", depth=i, shape=shape)
        for i, own, shape in kinds
    ]
    right = {"verdict": "ok", "error": 1e-9, "bar": 1e-6, "rounding_error": 1e-7}
    numbers = [right | ({"verdict": "mismatch", "error": 0.1} if i == wrong else {}) for i in range(len(weights) + 1)]
    rows = [TensorCheck(tensor=info.tensor, **row) for info, row in zip([image, *weights], numbers, strict=True)]
    check = CheckResult(tensors=(image, *weights), checks=tuple(rows))

    history = History([image, *weights], {"keras": "3.15.1", "model": "model", "check_freq": 10, **attributes})
    random, strength = np.random.default_rng(seed), 10.0 ** -np.repeat(np.arange(layers)[::-1], 2)
    for step in range(1, steps + 1):
        broken = 0 < broken_at <= step
        gradient = np.full(len(weights), np.nan) if broken else strength * random.uniform(0.9, 1.1, len(weights))
        columns = (4 * gradient, gradient, 2 * gradient, 0.25, 2 if broken else 0, 5.0, 1e-3)
        history.append(
            StepRecord(
                step=step, epoch=(step - 1) // 10, loss=np.nan if broken else 1 / step,
                statistics=np.stack(np.broadcast_arrays(*columns), axis=1).astype(float),
                connected=np.ones(len(weights), bool), check=check if checks and step % 10 == 1 else None,
            )
        )  # fmt: skip
    history.set_findings(findings)
    frame = history.to_frame()
    told = [{**asdict(finding), "tensors": list(finding.tensors)} for finding in findings]
    frame.attrs |= {"findings": told, "steps": steps, "layer_classes": {names(i): "Dense" for i in range(layers)}}
    return frame


@pytest.fixture(scope="session")
def make_run() -> Callable[..., "pd.DataFrame"]:
    """Makes history frames that look like those of runs."""
    return _run
