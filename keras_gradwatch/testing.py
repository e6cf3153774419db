"""Gradient checks for tests of one's own: :func:`assert_gradients`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_gradwatch.checks import check_gradients, check_layer
from keras_gradwatch.jacobian import Arguments, compute_gradient
from keras_gradwatch.probe import has_loss
from keras_gradwatch.records import Evidence
from keras_gradwatch.summary import evidence_lines, render_check

#: What the analytic side of a plain function may lose in its own dtype, relative to the largest entry of its Jacobian.
#: Wide enough for sums of thousands of terms, far below a wrong formula. Float64 may pass through float32. Our choice.
_TOLERANCES = {"float64": 1e-6, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
_MOST_ROWS = 12
#: Entries up to which every one is compared, and directions compared beyond. Our choice.
_MOST_ENTRIES, _DIRECTIONS = 5_000, 8


def assert_gradients(
    target: Any, x: Any, y: Any = None, sample_weight: Any = None, *, training: bool = True,
    surrogates: Sequence[str] = (), delta: float | None = None, rtol: float | None = None, seed: int = 0,
) -> None:  # fmt: skip
    """Fail a test unless the gradients of a layer, model or function are the slopes of what it computes.

    Args:
        target: a ``keras.Layer`` or model, by what it returns; a compiled model with ``y``, by its loss; or a function
            of tensors that returns one.
        x: for a layer or model, data as in :func:`~keras_gradwatch.check_layer` (an array ``[batch, ...]``, a shape, a
            spec) or :func:`~keras_gradwatch.check_gradients`; for a function, its argument, or a list or tuple of its
            arguments, as in :func:`~keras_gradwatch.compute_gradient`.
        y: targets of a compiled model, as for ``fit``.
        sample_weight: weights per sample of a compiled model, as for ``fit``.
        training: call layers and models in training mode.
        surrogates: layers of a compiled model that differ on purpose.
        delta: difference step of a function. Layers and models choose their own.
        rtol: what the gradient of a function may lose to its dtype, relative to its largest entry. Default: 1e-6 for
            float64, 1e-4 for float32, 2e-2 for float16, 1e-1 for bfloat16. Layers and models are judged in float64.
        seed: of data, cotangent and directions.

    Raises:
        AssertionError: some tensor is not certified. The message shows, aligned, the wrong tensors' slopes: tensor,
            direction or entry, analytic, numeric, error, bar, delta, dtype.
        TypeError: ``target`` is none of these.
        ValueError: an argument that does not belong to the target was given.

    Example:
        ``assert_gradients(MyLayer(), (8, 16))`` in a test.
    """
    import keras

    if isinstance(target, keras.layers.Layer):
        if delta is not None or rtol is not None:
            raise ValueError(
                f"Received delta={delta}, rtol={rtol} with the layer {target.name}. Expected neither: layers and "
                "models are checked in float64 with steps of their own. Leave them out."
            )
        _assert_layer(target, (x, y, sample_weight), training, surrogates, seed)
    elif callable(target):
        if y is not None or sample_weight is not None or surrogates:
            raise ValueError(
                "Received y, sample_weight or surrogates with a plain function. Expected x alone. "
                "Put targets into the function or into its arguments."
            )
        _assert_function(target, x, delta, rtol, seed)
    else:
        raise TypeError(
            f"Received an object of type {type(target).__name__}. Expected a keras.Layer, a model or a function. "
            "Give one of them."
        )


def _assert_layer(
    target: Any, data: tuple[Any, Any, Any], training: bool, surrogates: Sequence[str], seed: int
) -> None:
    import keras

    x, y, sample_weight = data
    by_loss = isinstance(target, keras.Model) and target.compiled and (y is not None or _has_only_own_loss(target))
    if not by_loss and (y is not None or surrogates):
        raise ValueError(
            f"Received y or surrogates with {target.name}, which is not a compiled model. Expected x alone. "
            "Compile the model with its loss, or leave them out."
        )
    if by_loss:
        report = check_gradients(
            target, x, y, sample_weight, training=training, surrogates=surrogates, seed=seed, locate=True
        )
    else:
        report = check_layer(target, x, training=training, seed=seed, locate=True)
    if not report.ok:
        what = "loss" if by_loss else "output"
        title = f"gradients of the {what} of {target.name} ({type(target).__name__}) are not certified"
        raise AssertionError(f"{title}\n{render_check(report.result)}")


def _has_only_own_loss(model: Any) -> bool:
    """It needs no targets: its loss comes from ``add_loss`` or its own ``compute_loss``."""
    return model._compile_loss is None and has_loss(model)


def _assert_function(f: Callable[..., Any], x: Any, delta: float | None, rtol: float | None, seed: int) -> None:
    import keras

    arguments = list(x) if isinstance(x, list | tuple) else [x]
    known = Arguments(f, arguments)
    size = sum(int(np.size(leaf)) for leaf in known.leaves)
    projections = _DIRECTIONS if size > _MOST_ENTRIES else None
    results = compute_gradient(f, arguments, delta, projections=projections, error_bars=True, seed=seed)
    wrong: list[Evidence] = []
    for name, dtype, *jacobians in zip(known.names, known.dtypes, *map(keras.tree.flatten, results), strict=True):
        wrong += _disagreements(f"argument {name}", dtype, jacobians, delta, rtol, projections)
    if wrong:
        shown = evidence_lines(wrong[:_MOST_ROWS])
        more = [f"  … and {len(wrong) - _MOST_ROWS} more"] if len(wrong) > _MOST_ROWS else []
        title = f"gradients of {getattr(f, '__name__', type(f).__name__)} are wrong in {len(wrong)} entries"
        raise AssertionError("\n".join([title, *shown, *more]))


def _disagreements(
    name: str, dtype: str, jacobians: Sequence[Any], delta: float | None, rtol: float | None, projections: int | None
) -> list[Evidence]:
    """Entries beyond their bars, the worst first."""
    analytic, numeric, bar = (np.asarray(part, np.float64) for part in jacobians)
    if not analytic.size:
        return []
    finite = np.isfinite(analytic)
    scale = float(np.max(np.abs(analytic), where=finite, initial=0.0))
    bar = bar + (_TOLERANCES.get(dtype, 1e-4) if rtol is None else rtol) * scale
    gap = np.abs(analytic - numeric)
    entries = np.argwhere(~(gap <= bar))
    ordered = sorted(entries.tolist(), key=lambda e: -np.nan_to_num(gap[tuple(e)], nan=np.inf, posinf=np.inf))
    label = "projection {1}" if projections else "y[{0}] x[{1}]"
    return [
        Evidence(
            tensor=name, along=label.format(*entry), analytic=float(analytic[tuple(entry)]),
            numeric=float(numeric[tuple(entry)]), bar=float(bar[tuple(entry)]), delta=delta or 1e-6, dtype=dtype,
        )
        for entry in ordered
    ]  # fmt: skip
