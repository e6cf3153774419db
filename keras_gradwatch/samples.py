"""What was measured of the weights, as tables of step × weight or step × layer: what pictures are drawn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from keras_gradwatch.records import Float64Array, Int64Array
from keras_gradwatch.schema import categorical

BoolArray = npt.NDArray[np.bool_]
IndexArray = npt.NDArray[np.intp]

#: What can be asked of each layer at each step.
Quantity = Literal["rms", "norm", "update_ratio", "zero_fraction"]

_QUANTITIES: dict[Quantity, str] = {
    "rms": "gradient rms",
    "norm": "gradient norm",
    "update_ratio": "‖update‖ / ‖weight‖ per step",
    "zero_fraction": "share of zeros in the gradient",
}

#: Cells a table may have. A history of 10,000 steps of 300 weights has 3 million; what would need more is no table.
MOST_CELLS = 100_000_000


@dataclass(frozen=True)  # no slots: tables are kept once made
class Samples:
    """The rows of the weights in a history frame, by step and weight. Make one with :func:`samples_of`.

    Attributes:
        steps: shape ``[S]``, rising.
        losses: shape ``[S]``, each batch's own loss; NaN where it was not observed.
        layers: names of the layers that own weights, in network order.
        tensors: names of the weights, in network order, those of one layer side by side.
        sizes: shape ``[V]``, elements of each weight.
        owners: shape ``[V]``, index into ``layers`` for each weight, never falling.
    """

    steps: Int64Array
    losses: Float64Array
    layers: tuple[str, ...]
    tensors: tuple[str, ...]
    sizes: Int64Array
    owners: IndexArray
    _frame: pd.DataFrame
    _rows: IndexArray
    _cells: IndexArray

    def table(self, column: str) -> Float64Array:
        """One column of the frame, shape ``[S, V]``; NaN where there is no row."""
        cells = np.full(len(self.steps) * len(self.tensors), np.nan)
        cells[self._cells] = self._frame[column].to_numpy(np.float64, na_value=np.nan)[self._rows]
        return cells.reshape(len(self.steps), len(self.tensors))

    def by_layer(self, quantity: Quantity) -> Float64Array:
        """The quantity of each layer, shape ``[S, L]``; NaN where not measured or not finite."""
        tables: dict[Quantity, Callable[[], Float64Array]] = {
            "rms": lambda: self.rms,
            "norm": lambda: self.norms,
            "update_ratio": lambda: self.update_ratios,
            "zero_fraction": lambda: self.zero_fractions,
        }
        return tables[quantity]()

    @cached_property
    def nonfinite(self) -> BoolArray:
        """Where a gradient held NaN or Inf, shape ``[S, L]``."""
        return np.asarray(self._by_layer(np.fmax, np.nan_to_num(self.table("nonfinite_count"))) > 0, np.bool_)

    @cached_property
    def norms(self) -> Float64Array:
        """Gradient norm of each layer, shape ``[S, L]``; NaN where not measured or not finite."""
        return self._masked(self._l2_norms(self.table("grad_norm")))

    @cached_property
    def rms(self) -> Float64Array:
        """Root mean square of each layer's gradient, shape ``[S, L]``; NaN where not measured or not finite."""
        return np.asarray(self.norms / np.sqrt(np.maximum(self._layer_sizes(), 1)), np.float64)

    @cached_property
    def global_norms(self) -> Float64Array:
        """Norm of all gradients together, shape ``[S]``; NaN where nothing was measured or anything is not finite."""
        largest = np.fmax.reduce(np.where(np.isfinite(self.norms), self.norms, 0.0), axis=1, initial=0.0)
        scale = np.where(largest > 0, largest, 1.0)
        norms = scale * np.sqrt(np.nansum((self.norms / scale[:, None]) ** 2, axis=1))
        unknown = np.isnan(self.norms).all(axis=1) | self.nonfinite.any(axis=1)
        return np.where(unknown, np.nan, norms)

    @cached_property
    def update_ratios(self) -> Float64Array:
        """‖applied update‖ / ‖weights‖ of each layer, shape ``[S, L]``."""
        weights, ratios = self.table("weight_norm"), self.table("update_ratio")
        # A weight at zero has ratio 0 or 1 by convention, and no norm that could be multiplied back.
        size = np.where(weights > 0, weights, np.nan)
        with np.errstate(invalid="ignore", divide="ignore"):
            together = self._l2_norms(ratios * size) / self._l2_norms(size)
        return self._masked(np.where(np.isnan(together), self._by_layer(np.fmax, ratios), together))

    @cached_property
    def zero_fractions(self) -> Float64Array:
        """Share of exact zeros in each layer's gradient, shape ``[S, L]``."""
        zeros = self.table("zero_fraction")
        counts = self._by_layer(np.add, np.nan_to_num(zeros) * self.sizes)
        return self._masked(counts / np.maximum(self._by_layer(np.add, np.where(np.isnan(zeros), 0, self.sizes)), 1))

    @cached_property
    def tracked(self) -> BoolArray:
        """Steps at which anything was measured, shape ``[S]``; others only hold a gradient check."""
        return np.asarray(~np.isnan(self.norms).all(axis=1) | self.nonfinite.any(axis=1), np.bool_)

    def _masked(self, values: Float64Array) -> Float64Array:
        return np.where(self.nonfinite, np.nan, values)

    def _layer_sizes(self) -> Int64Array:
        return np.asarray(np.bincount(self.owners, self.sizes, len(self.layers)), np.int64)

    def _by_layer(self, reduction: np.ufunc, values: Float64Array) -> Float64Array:
        """``[S, V]`` to ``[S, L]``; weights of a layer lie side by side."""
        starts = np.flatnonzero(np.diff(self.owners, prepend=-1))
        return np.asarray(reduction.reduceat(values, starts, axis=1), np.float64) if len(starts) else values

    def _l2_norms(self, values: Float64Array) -> Float64Array:
        """Norms of each layer from norms of its weights; NaN only where all are."""
        norms = self._root_sums(values)
        if np.isinf(norms).any() or (norms == 0).any():  # squares may have left the range: once more, scaled
            largest = self._by_layer(np.fmax, np.where(np.isfinite(values), np.abs(values), 0.0))
            scale = np.where(largest > 0, largest, 1.0)
            norms = scale * self._root_sums(values / scale[:, self.owners])
        return norms

    def _root_sums(self, values: Float64Array) -> Float64Array:
        missing = np.isnan(values)
        with np.errstate(over="ignore"):
            if not missing.any():
                return np.sqrt(self._by_layer(np.add, values**2))
            roots = np.sqrt(self._by_layer(np.add, np.where(missing, 0.0, values) ** 2))
        return np.where(self._by_layer(np.minimum, missing.astype(np.float64)) > 0, np.nan, roots)


def samples_of(frame: pd.DataFrame) -> Samples:
    """The weights of a history frame as tables.

    Args:
        frame: a history frame, such as ``watch.history`` or what ``read_history`` returns.

    Returns:
        Tables over the sampled steps and the weights; both may be empty. Of two rows for one step and weight the later
        one counts.

    Raises:
        ValueError: columns are missing, or the rows would fill less than a hundredth of a very large table.

    Example:
        >>> from keras_gradwatch.history import History
        >>> samples_of(History((), {}).to_frame()).layers
        ()
    """
    absent = [name for name in ("step", "layer", "tensor", "role", "size", "loss", "grad_norm") if name not in frame]
    if absent:
        raise ValueError(
            f"Received a frame without the columns {', '.join(absent)}. Expected a history frame. Pass watch.history "
            "or what read_history(path) returns."
        )
    rows = np.flatnonzero((frame["role"] == "weight").to_numpy())
    step, steps = places_of(frame["step"].to_numpy()[rows])
    layer, layers = codes_of(frame["layer"])
    tensor, tensors = codes_of(frame["tensor"])
    if len(rows) and min(layer[rows].min(), tensor[rows].min()) < 0:
        raise ValueError("Received rows without a layer or tensor. Expected a name in each. Drop those rows.")
    weight, weights = places_of(layer[rows] * max(len(tensors), 1) + tensor[rows])
    if len(steps) * len(weights) > MOST_CELLS:
        raise ValueError(
            f"Received a history of {len(steps):,} steps and {len(weights):,} weights. Expected at most "
            f"{MOST_CELLS:,} cells. Pass fewer rows, such as frame[frame.step % 10 == 0]."
        )
    owners, used = places_of(weights // max(len(tensors), 1))
    sizes, losses = np.zeros(len(weights), np.int64), np.full(len(steps), np.nan)
    sizes[weight] = frame["size"].to_numpy()[rows]
    losses[step] = frame["loss"].to_numpy(np.float64, na_value=np.nan)[rows]
    return Samples(
        steps=steps, losses=losses, layers=tuple(layers[i] for i in used),
        tensors=tuple(tensors[i] for i in weights % max(len(tensors), 1)), sizes=sizes, owners=owners,
        _frame=frame, _rows=rows, _cells=step * len(weights) + weight,
    )  # fmt: skip


def quantity_name(quantity: Quantity) -> str:
    """The quantity in words.

    Raises:
        ValueError: it is none of :data:`Quantity`.
    """
    if quantity not in _QUANTITIES:
        raise ValueError(
            f"Received quantity={quantity!r}. Expected one of {', '.join(map(repr, _QUANTITIES))}. Choose one of them."
        )
    return _QUANTITIES[quantity]


def bins(count: int, most: int) -> IndexArray:
    """Starts of at most ``most`` bins of neighbours, shape ``[min(count, most)]``."""
    return np.unique(np.linspace(0, count, min(count, most), endpoint=False).astype(np.intp))


def binned_extremes(values: Float64Array, starts: IndexArray) -> Float64Array:
    """The largest in each bin of steps, ``[S, N]`` to ``[B, N]``; NaN only where all are."""
    return np.asarray(np.fmax.reduceat(values, starts, axis=0), np.float64)


def binned_means(values: Float64Array, starts: IndexArray) -> Float64Array:
    """Geometric means of the positive values in each bin of steps, ``[S, N]`` to ``[B, N]``; 0 where all are zero.

    ``exp(Σ log v / n)``: a spike does not swamp a bin, and a value of 1e-300 does not vanish in it.
    """
    positive = values > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        logarithms = np.add.reduceat(np.where(positive, np.log(np.where(positive, values, 1.0)), 0.0), starts, axis=0)
        means = np.exp(logarithms / np.add.reduceat(positive.astype(np.int64), starts, axis=0))
    return np.where(np.isnan(means), binned_extremes(values, starts), means)


def binned_averages(values: Float64Array, starts: IndexArray) -> Float64Array:
    """Arithmetic means of what was measured in each bin of steps, ``[S, N]`` to ``[B, N]``; NaN where nothing was."""
    known = ~np.isnan(values)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts, axis=0)
    counts = np.add.reduceat(known.astype(np.int64), starts, axis=0)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def medians(values: Float64Array) -> Float64Array:
    """Median over the steps of what was measured, ``[S, N]`` to ``[N]``; NaN for a column without anything."""
    if not values.size:
        return np.full(values.shape[1], np.nan)
    # NaN sorts to the end. numpy.nanmedian gives the same, fifty times slower.
    ordered = np.sort(values.T, axis=1)
    known = np.count_nonzero(~np.isnan(values), axis=0)
    middle = np.stack([np.maximum(known - 1, 0) // 2, np.minimum(known // 2, len(values) - 1)], axis=1)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.take_along_axis(ordered, middle, axis=1).mean(axis=1), np.float64)


def codes_of(names: pd.Series[Any]) -> tuple[Int64Array, list[str]]:
    """Codes in network order, that of the categories (-1 for none), and the names."""
    if not isinstance(names.dtype, pd.CategoricalDtype):
        names = names.astype(categorical(str(name) for name in names.dropna().unique()))
    return np.asarray(names.cat.codes, np.int64), [str(name) for name in names.cat.categories]


def places_of(values: npt.NDArray[Any]) -> tuple[IndexArray, npt.NDArray[Any]]:
    """For each value its place among the distinct ones in order, and those: ``np.unique``, without sorting all."""
    codes, distinct = pd.factorize(values)
    order = np.argsort(distinct)
    places = np.empty(len(order), np.intp)
    places[order] = np.arange(len(order))
    return places[codes], distinct[order]
