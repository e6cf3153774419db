"""Analytic and numeric Jacobians of a function, side by side, in the manner of ``tf.test.compute_gradient``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_gradwatch.backends import function_backend

Array = npt.NDArray[Any]

#: Central-difference step in float64, relative to max(1, |x|). Error about 1e-12 · |f'''| + 1e-10 · |f|; short enough
#: to step over hardly any kink. In lower precision the textbook optimum eps^(1/3) is used (Press et al., Numerical
#: Recipes, 3rd ed., section 5.7), rounded to a power of two so that ``x ± delta`` loses no digits.
_FLOAT64_DELTA = 1e-6


def compute_gradient(
    f: Callable[..., Any], x: Sequence[Any], delta: float | None = None
) -> tuple[list[Array], list[Array]]:
    """The Jacobian of ``f`` twice: by backpropagation, and by central differences.

    Unlike ``tf.test.compute_gradient`` the numeric side is evaluated in float64 whenever the function can be (also when
    it holds float32 constants or variables), in a few compiled calls, and a function that does not depend on an
    argument is refused rather than passed as 0 = 0.

    Args:
        f: takes ``len(x)`` tensors and returns one float or complex tensor ``y`` of any shape.
        x: its arguments: a list or tuple of float or complex arrays of any shapes.
        delta: difference step, absolute. Default: chosen per entry, ``1e-6 · max(1, |x|)`` in float64.

    Returns:
        Two lists with one 2-D array per argument, of shape ``[y.size, x.size]`` (a complex number counts as two reals):
        the analytic Jacobians in the dtype of ``x``, the numeric ones in float64. Sizes may be zero.

    Raises:
        TypeError: an argument or the result is not float or complex.
        ValueError: ``x`` is not a list or tuple, or ``f`` does not depend on one of its arguments.

    Example:
        ``analytic, numeric = compute_gradient(lambda x: x * x, [3.0])`` gives ``[[6.]]`` twice.
    """
    if not isinstance(x, list | tuple):
        raise ValueError(
            f"Received x of type {type(x).__name__}. Expected a list or tuple of arguments for f. "
            "Write [x] for one argument."
        )
    if delta is not None and not delta > 0:
        raise ValueError(f"Received delta={delta}. Expected a positive step. Leave it out to have it chosen.")
    function = function_backend().Function(f, [_argument(value, i) for i, value in enumerate(x)])
    for index, used in enumerate(function.used):
        if not used and function.sizes[index]:
            raise ValueError(
                f"f does not depend on its argument {index}: analytic and numeric gradient would both be 0 and agree "
                "about nothing. Expected a function of its arguments. If f reads variables (a model's weights, say) "
                "from outside, pass their values as arguments and use those, or call check_gradients(model, x, y)."
            )
    return function.analytic(), [function.numeric(i, _steps(function, i, delta)) for i in range(len(x))]


def compute_gradient_error(f: Callable[..., Any], x: Sequence[Any], delta: float | None = None) -> float:
    """The largest absolute difference between the analytic and the numeric Jacobian of ``f``.

    Args:
        f: as for :func:`compute_gradient`.
        x: as for :func:`compute_gradient`.
        delta: as for :func:`compute_gradient`.

    Returns:
        A float ≥ 0 in units of the Jacobian; 0.0 if it is empty, NaN if any entry is NaN.

    Raises:
        TypeError: as for :func:`compute_gradient`.
        ValueError: as for :func:`compute_gradient`.
    """
    analytic, numeric = compute_gradient(f, x, delta)
    gaps = [np.abs(a.astype(np.float64) - n) for a, n in zip(analytic, numeric, strict=True)]
    return max((float(np.max(gap)) for gap in gaps if gap.size), default=0.0)


def _argument(value: Any, index: int) -> Any:
    value = getattr(value, "value", value) if hasattr(value, "path") else value  # a Keras variable stands for its value
    if not hasattr(value, "dtype"):
        value = np.asarray(value)
        value = (
            value.astype(np.float32) if value.dtype == np.float64 else value
        )  # Python floats, as TensorFlow reads them
    name = str(getattr(value.dtype, "name", value.dtype))
    if not any(kind in name for kind in ("float", "complex")):
        raise TypeError(
            f"Argument {index} has dtype {name}. Expected a float or complex dtype: integers have no gradient. "
            "Cast it, or bind it inside f."
        )
    return value


def _steps(function: Any, index: int, delta: float | None) -> npt.NDArray[np.float64]:
    """One step per real entry of an argument."""
    size = np.abs(function.entries(index))
    if delta is not None:
        return np.full(size.shape, float(delta))
    unit = _FLOAT64_DELTA if function.wide else 2.0 ** round(np.log2(function.epsilon(index)) / 3)
    steps: npt.NDArray[np.float64] = unit * np.maximum(1.0, size)
    return steps
