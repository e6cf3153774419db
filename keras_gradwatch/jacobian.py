"""Analytic and numeric Jacobians of a function, side by side, in the manner of ``tf.test.compute_gradient``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_gradwatch.backends import function_backend
from keras_gradwatch.slopes import EPSILON

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]

#: Central-difference step in float64, relative to max(1, |x|). Error about 1e-12 · |f'''| + 1e-10 · |f|; short enough
#: to step over hardly any kink. In lower precision the textbook optimum eps^(1/3) is used (Press et al., Numerical
#: Recipes, 3rd ed., section 5.7), rounded to a power of two so that ``x ± delta`` loses no digits.
_FLOAT64_DELTA = 1e-6

#: Entries of all arguments together of which a full Jacobian is taken: twice as many calls of f. Our choice.
LARGEST = 200_000

#: Numbers in all full Jacobians together (400 MB), and in a result that projections leave as it is. Our choice.
_LARGEST_JACOBIAN, _LONG_RESULT = 50_000_000, 1_000

#: Rounding of one result, in units of its dtype's eps, that an error bar allows for; as for losses (``slopes``).
_NOISE = 8.0

#: Rounding of an analytic gradient, in units of its dtype's eps: sums of tens of terms cost a few. Our choice.
_ANALYTIC_NOISE = 32.0


def compute_gradient(
    f: Callable[..., Any], x: Sequence[Any], delta: float | None = None, *, order: int = 1,
    projections: int | None = None, error_bars: bool = False, seed: int = 0,
) -> tuple[list[Any], ...]:  # fmt: skip
    """The Jacobian of ``f`` twice: by backpropagation, and by central differences.

    Unlike ``tf.test.compute_gradient`` the numeric side is evaluated in float64 whenever the function can be (also when
    it holds float32 constants or variables), in a few compiled calls, and a function that does not depend on an
    argument is refused rather than passed as 0 = 0.

    Args:
        f: takes ``len(x)`` arguments and returns one float or complex tensor ``y`` of any shape.
        x: its arguments: a list or tuple, of float or complex arrays of any shapes or of nested dicts, lists and tuples
            (pytrees) of them. A nested list of plain numbers is an array.
        delta: difference step, absolute. Default: chosen per entry, ``1e-6 · max(1, |x|)`` in float64.
        order: 1, or 2 for second derivatives: ``f`` returns a single number, and the Jacobian of its gradient (by all
            arguments, flat) by backpropagation is compared with differences of the gradient.
        projections: compare along that many random directions per array, entries ±1, instead of along every entry:
            for functions of millions of numbers. With ``order=2`` the gradient is projected on the same directions. A
            result of more than 1,000 numbers is projected, too.
        error_bars: also return what the differences may be off by: rounding, truncation, and at a kink half the jump
            between left and right slope; and what the analytic side may lose in its own dtype.
        seed: of the random directions.

    Returns:
        Two lists (with ``error_bars`` three) with one 2-D array per argument, of shape ``[y.size, x.size]`` (a complex
        number counts as two reals), or a pytree of such arrays where the argument is one: the analytic Jacobians in the
        dtype of ``x`` (with ``projections``, summed up in float64), the numeric ones and the bars in float64.
        Sizes may be zero. With ``projections=k`` there are
        ``k`` columns; with ``order=2`` there is a row per entry of all arguments, or ``k`` of them; a result of more
        than 1,000 numbers has ``k`` rows.

    Raises:
        TypeError: an argument or the result is not float or complex, or complex with ``order=2``.
        ValueError: ``x`` is not a list or tuple, ``f`` does not depend on one of its arguments, there are more than
            200,000 entries (or 50 million numbers in the Jacobians) and no ``projections``, or a setting is out of
            range.

    Example:
        ``analytic, numeric = compute_gradient(lambda x: x * x, [3.0])`` gives ``[[6.]]`` twice.
    """
    _check_settings(x, delta, order, projections)
    tree = Arguments(f, x)
    function, plain = tree.functions(order, projections, seed)
    analytic = function.analytic()
    units = [plain.epsilon(i) for i in range(len(tree.leaves))]
    sides = [_differences(function, i, delta, error_bars, EPSILON if plain.wide else u) for i, u in enumerate(units)]
    found = [analytic, [numeric for numeric, _ in sides]]
    if error_bars:
        precision = [_ANALYTIC_NOISE * unit for unit in units]
        found.append([bar + p * _largest(a) for a, (_, bar), p in zip(analytic, sides, precision, strict=True)])
    return tuple(tree.packed(arrays) for arrays in found)


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
    import keras

    analytic, numeric = compute_gradient(f, x, delta)
    pairs = zip(keras.tree.flatten(analytic), keras.tree.flatten(numeric), strict=True)
    gaps = [float(np.max(np.abs(a.astype(np.float64) - n))) for a, n in pairs if a.size]
    return math.nan if any(map(math.isnan, gaps)) else max(gaps, default=0.0)


class Arguments:
    """A function of pytrees as a function of the arrays in them.

    Attributes:
        leaves: the arrays, in order.
        names: what to call them.
        dtypes: of each, as its real part has it: a complex64 array counts as float32.
    """

    def __init__(self, f: Callable[..., Any], x: Sequence[Any]) -> None:
        import keras

        self._f = f
        arrays = [_as_arrays(argument) for argument in x]
        named = [
            (_name(i, path), leaf) for i, tree in enumerate(arrays) for path, leaf in keras.tree.flatten_with_path(tree)
        ]
        self.names = [name for name, _ in named]
        self.leaves = [_argument(leaf, name) for name, leaf in named]
        parts = {"complex64": "float32", "complex128": "float64"}
        self.dtypes = [parts.get(_dtype(leaf), _dtype(leaf)) for leaf in self.leaves]
        self._structure = arrays

    def packed(self, leaves: Sequence[Any]) -> list[Any]:
        """One value per array, in the form of the arguments."""
        import keras

        found: list[Any] = keras.tree.pack_sequence_as(self._structure, list(leaves))
        return found

    def functions(self, order: int, projections: int | None, seed: int) -> tuple[Any, Any]:
        """What is differentiated (the function itself, its gradient, or either along directions); and the function.

        Raises:
            ValueError: an argument does not matter, or there are too many entries.
        """
        backend = function_backend()
        plain = backend.Function(self._scalar if order == 2 else self._flat, self.leaves)
        for name, used, size in zip(self.names, plain.used, plain.sizes, strict=True):
            if not used and size:
                raise ValueError(
                    f"f does not depend on its argument {name}: analytic and numeric gradient would both be 0 and "
                    "agree about nothing. Expected a function of its arguments. If f reads variables (a model's "
                    "weights, say) from outside, pass their values as arguments and use those, or call "
                    "check_gradients(model, x, y)."
                )
        if projections is None:
            self._check_size(sum(map(_reals, self.leaves)) if order == 2 else plain.rows)
        if order == 1 and projections is None:
            return plain, plain
        chosen = self._flat if order == 1 else backend.gradient_of(self._scalar)
        if projections is None:
            return backend.Function(chosen, self.leaves), plain
        directions = _Directions(self.leaves, projections, seed)
        return backend.Function(directions.along(chosen, order), directions.zeros()), plain

    def _flat(self, *leaves: Any) -> Any:
        return self._f(*self.packed(leaves))

    def _scalar(self, *leaves: Any) -> Any:
        import keras

        result = keras.ops.convert_to_tensor(self._flat(*leaves))
        if math.prod(result.shape) != 1:
            raise ValueError(
                f"f returned a result of shape {tuple(result.shape)}. Expected a single number: order=2 compares the "
                "second derivatives of a scalar. Sum it up, or pick one entry, inside f."
            )
        if "complex" in _dtype(result) or any("complex" in _dtype(leaf) for leaf in leaves):
            raise TypeError("Received complex numbers with order=2. Expected real ones. Pass real and imaginary parts.")
        return keras.ops.reshape(result, ())

    def _check_size(self, rows: int) -> None:
        entries = sum(_reals(leaf) for leaf in self.leaves)
        if entries > LARGEST or entries * rows > _LARGEST_JACOBIAN:
            raise ValueError(
                f"The arguments have {entries:,} entries and the result {rows:,}: the full Jacobian takes "
                f"{2 * entries:,} calls of f and holds {entries * rows:,} numbers. Expected at most {LARGEST:,} "
                f"entries and {_LARGEST_JACOBIAN:,} numbers. Pass projections=8 to compare along 8 random directions, "
                "or call check_gradients for a model."
            )


class _Directions:
    """Random directions through each of some arrays: entries ±1, so that each entry moves by the full step."""

    def __init__(self, leaves: Sequence[Any], count: int, seed: int) -> None:
        import keras

        self._leaves = [keras.ops.convert_to_tensor(leaf) for leaf in leaves]
        self._count, self._seed = count, seed
        generator = np.random.default_rng(seed)
        # One byte a sign, and outside of the function, so that they do not become part of its graph.
        self._signs = [keras.ops.convert_to_tensor(_signs(generator, _reals(leaf), count)) for leaf in leaves]

    def zeros(self) -> list[Array]:
        """The base point: coefficients of the directions, per array."""
        return [np.zeros(self._count) for _ in self._leaves]  # float64: the sum of a million gradients loses nothing

    def along(self, f: Callable[..., Any], order: int) -> Callable[..., Any]:
        """The function of the coefficients; a gradient is projected on the directions, too."""
        import keras

        def moved(*coefficients: Any) -> Any:
            found = [self._moved(i, c) for i, c in enumerate(coefficients)]
            result = keras.ops.convert_to_tensor(f(*found))
            size = math.prod(result.shape)
            if order == 2:
                return _projected(result, keras.ops.concatenate(self._signs, axis=0))
            if size <= _LONG_RESULT or "complex" in _dtype(result):
                return result
            rows = _signs(np.random.default_rng([abs(self._seed), 1]), size, self._count)
            return _projected(keras.ops.reshape(result, (-1,)), keras.ops.convert_to_tensor(rows))

        return moved

    def _moved(self, index: int, coefficients: Any) -> Any:
        from keras import ops

        leaf = self._leaves[index]
        move = ops.cast(self._signs[index], "float64") @ ops.reshape(ops.cast(coefficients, "float64"), (-1, 1))
        if "complex" in _dtype(leaf):
            pairs = ops.reshape(move, (*leaf.shape, 2))
            # i · x by the cast alone: complex numbers cannot be put together in keras.ops.
            move = ops.cast(pairs[..., 0], _dtype(leaf)) + 1j * ops.cast(pairs[..., 1], _dtype(leaf))
            return leaf + move
        return leaf + ops.cast(ops.reshape(move, leaf.shape), leaf.dtype)


def _signs(generator: np.random.Generator, size: int, count: int) -> npt.NDArray[np.int8]:
    found: npt.NDArray[np.int8] = generator.integers(0, 2, (size, count), dtype=np.int8) * np.int8(2) - np.int8(1)
    return found


def _projected(flat: Any, signs: Any) -> Any:
    """A flat vector's products with the columns of a matrix of signs."""
    from keras import ops

    # Not ops.matmul, whose rules of promotion make float32 of float64 on some backends.
    return (ops.reshape(ops.cast(flat, "float64"), (1, -1)) @ ops.cast(signs, "float64"))[0]


def _check_settings(x: Any, delta: float | None, order: int, projections: int | None) -> None:
    if not isinstance(x, list | tuple):
        raise ValueError(
            f"Received x of type {type(x).__name__}. Expected a list or tuple of arguments for f. "
            "Write [x] for one argument."
        )
    if delta is not None and not delta > 0:
        raise ValueError(f"Received delta={delta}. Expected a positive step. Leave it out to have it chosen.")
    if order not in (1, 2):
        raise ValueError(f"Received order={order!r}. Expected 1 for the gradient or 2 for second derivatives.")
    if projections is not None and (not isinstance(projections, int) or projections < 1):
        raise ValueError(f"Received projections={projections!r}. Expected a number of directions, such as 8, or None.")


def _as_arrays(argument: Any) -> Any:
    """An argument with every nested list of plain numbers turned into one array, as TensorFlow reads it."""
    import keras

    def visit(node: Any) -> Any:
        numbers = isinstance(node, list | tuple) and bool(leaves := keras.tree.flatten(node))
        if numbers and all(isinstance(leaf, int | float | complex) for leaf in leaves):
            return np.asarray(node)
        return None if keras.tree.is_nested(node) else node

    return keras.tree.traverse(visit, argument, top_down=True)


def _name(index: int, path: Sequence[Any]) -> str:
    return f"{index}{''.join(f'[{key!r}]' for key in path)}"


def _argument(value: Any, name: str) -> Any:
    value = getattr(value, "value", value) if hasattr(value, "path") else value  # a Keras variable stands for its value
    if not hasattr(value, "dtype"):
        value = np.asarray(value)
        # Python floats, as TensorFlow reads them.
        value = value.astype({"float64": np.float32, "complex128": np.complex64}.get(value.dtype.name, value.dtype))
    if not any(kind in _dtype(value) for kind in ("float", "complex")):
        raise TypeError(
            f"Argument {name} has dtype {_dtype(value)}. Expected a float or complex dtype: integers have no gradient. "
            "Cast it, or bind it inside f."
        )
    return value


def _dtype(value: Any) -> str:
    return str(getattr(value.dtype, "name", value.dtype)).removeprefix("torch.")


def _reals(leaf: Any) -> int:
    return math.prod(int(n) for n in np.shape(leaf)) * (2 if "complex" in _dtype(leaf) else 1)


def _differences(
    function: Any, index: int, delta: float | None, bars: bool, unit: float
) -> tuple[Float64Array, Float64Array]:
    """The numeric Jacobian of one argument, and its error bars (zeros where they are not asked for).

    ``unit`` is the unit of rounding of the arithmetic behind it.
    """
    steps = _steps(function.entries(index), delta, unit)
    if not bars:
        numeric = function.numeric(index, steps)
        return numeric, np.zeros_like(numeric)
    left, right, base = function.sides(index, steps)
    numeric = (left + right) / 2
    if not numeric.size:
        return numeric, np.zeros_like(numeric)
    shorter_left, shorter_right, _ = function.sides(index, steps / 2)
    # Truncation: for an error of order h² the central difference at h is off by 4/3 of its change from h to h/2.
    truncation = 4 / 3 * np.abs(numeric - (shorter_left + shorter_right) / 2)
    # A smooth function's jump halves with the step; what would be left at h = 0 is a kink.
    jump = np.abs(2 * (shorter_right - shorter_left) - (right - left))
    rounding = _NOISE * unit * np.abs(base)[:, None] / steps
    kink = np.where(jump > 16 * rounding + 1e-2 * np.abs(right - left), jump / 2, 0.0)
    return numeric, truncation + 4 * rounding + kink


def _steps(entries: Float64Array, delta: float | None, unit: float) -> Float64Array:
    """One step per real entry of an argument."""
    size = np.abs(entries)
    if delta is not None:
        return np.full(size.shape, float(delta))
    relative = _FLOAT64_DELTA if unit == EPSILON else 2.0 ** round(np.log2(unit) / 3)
    steps: Float64Array = relative * np.maximum(1.0, size)
    return steps


def _largest(array: Array) -> float:
    """Largest finite size of an array's entries, 0 if there is none."""
    size = np.abs(array.astype(np.float64))
    return float(np.max(size, where=np.isfinite(size), initial=0.0))
