"""From wrong tensors to the layer at fault: each suspect layer is tried alone, between its own inputs and outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_gradwatch.check import CheckSettings, Outcome, Part, Problem, check_problem
from keras_gradwatch.halving import row_words
from keras_gradwatch.probe import Subject, layer_paths
from keras_gradwatch.records import Culprit, Float64Array

#: What lies outside of all layers: the loss.
_OUTSIDE = -1
_NAN_LOSS = "the loss is NaN or Inf although the model's outputs are finite"


class Blame:
    """Looks for the culprit behind one check's verdicts, in the traced program of that check."""

    def __init__(
        self, subject: Subject, program: Any, values: tuple[list[Any], list[Any]], seed: int,
        settings: CheckSettings, problem_of: Callable[[Any], Problem],
    ) -> None:  # fmt: skip
        self._subject, self._program, self._values = subject, program, values
        self._seed, self._settings, self._problem_of = seed, settings, problem_of
        self.evaluations = 0

    @functools.cached_property
    def _paths(self) -> dict[int, str]:
        return layer_paths(self._subject.root)

    def mismatch(self) -> list[Culprit]:
        """Layers (or the loss) whose own backward disagrees with their forward, nearest the loss first.

        All layers are cut off from each other and tried at once: one sum of random projections of all their outputs,
        as a function of everything that enters them. The loss is tried first, on its own.
        """
        parts = self._program.parts
        if parts is None:
            return []
        inner = self._program.values([*parts.borders, parts.norms], *self._values)
        borders, norms = inner[:-1], np.asarray(inner[-1])
        of_loss = np.arange(len(norms)) == 0
        with np.errstate(divide="ignore"):
            even = np.where(of_loss | ~np.isfinite(norms) | (norms == 0), 0.0, 1.0 / norms)
        culprits = self._tried(parts, borders, np.where(of_loss, 1.0, 0.0))
        for culprit in self._tried(parts, borders, even):
            if culprit.layer not in {known.layer for known in culprits}:
                culprits.append(culprit)
        return culprits

    def nonfinite(self, loss: float) -> list[Culprit]:
        """What made the first NaN or Inf: data, labels, a layer's value, the loss, or a layer's backward."""
        data = self._bad_data()
        if data:
            return [data]
        flags = self._program.finite(*self._values)
        for k, (inputs, outputs, _, _) in sorted(flags, key=lambda flag: self._position(flag[0])):
            if inputs and not outputs and k != _OUTSIDE:
                return [self._named(k, "forward", "its output holds NaN or Inf although its inputs are finite")]
        if not np.isfinite(loss):
            return [Culprit(layer="loss", kind="forward", detail=_NAN_LOSS)]
        for k, (_, _, outputs, inputs) in sorted(flags, key=lambda flag: -self._position(flag[0])):
            if outputs and not inputs:
                return [
                    self._named(
                        k, "backward", "its backward gives NaN or Inf although the gradient of its output is finite"
                    )
                ]
        return [
            Culprit(layer="loss", kind="backward", detail="the gradient of the loss is NaN or Inf at finite outputs")
        ]

    def cuts(self, indices: Sequence[int]) -> list[Culprit]:
        """Where the gradient of disconnected tensors stops, one per place."""
        culprits: dict[str, Culprit] = {}
        for i in indices:
            info = self._subject.tensors[i]
            if not self._program.reached[i]:
                layer, name, detail = info.layer, info.layer_class, self._unused(i, "its weights")
            else:
                call, kind = self._program.cut(i)
                if not kind:
                    continue
                layer = self._path(call.operation) if call is not None else "loss"
                name = type(call.operation).__name__ if call is not None else ""
                detail = _cut_words(kind)
            before = culprits.get(layer)
            parts = (*before.parts, info.tensor) if before else (info.tensor,)
            culprits[layer] = Culprit(layer=layer, layer_class=name, kind="cut", parts=parts, detail=detail)
        return list(culprits.values())

    def cut_reason(self, index: int) -> str:
        """Why a tensor has no gradient, in words."""
        if not self._program.reached[index]:
            return self._unused(index, "it")
        call, kind = self._program.cut(index)
        if not kind:
            return "the loss depends on it, but its gradient is None"
        place = f" in layer {self._path(call.operation)}" if call is not None else ""
        return f"{_cut_words(kind)}{place}"

    def _unused(self, index: int, what: str) -> str:
        """Why the loss does not depend on a tensor, in words."""
        info = self._subject.tensors[index]
        if info.role == "input":
            return f"the loss does not depend on {what}"
        calls = [k for k, call in enumerate(self._program.calls) if self._path(call.operation) == info.layer]
        if not calls:
            why = f"layer {info.layer} is not called"
        elif not any(self._program.uses(k) for k in calls):
            why = f"what layer {info.layer} returns is unused"
        else:
            why = f"the call of layer {info.layer} reads none of them; what build made of them is a constant"
        return f"the loss does not depend on {what}: {why}"

    def stop_place(self, index: int) -> str:
        """Layer of the stop_gradient a tensor passes, for messages; empty when it cannot be told."""
        call = self._program.stop_call(index)
        return f" (layer {self._path(call.operation)})" if call is not None else ""

    def declared(self, problem: Problem, members: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Tensors whose plain numeric slope, stop_gradient let through, differs from their gradient."""
        naive = check_problem(_Naive(problem), self._seed + 5, self._settings, candidates=members)
        self.evaluations += naive.evaluations
        return np.array([verdict == "mismatch" for verdict in naive.verdicts])

    def _tried(self, parts: Any, borders: list[Any], scales: Float64Array) -> list[Culprit]:
        """Culprits among the parts whose outputs have a scale, nearest the loss first."""
        outcome = self._judged(parts, borders, scales)
        found: dict[int, list[int]] = {}
        for j, verdict in enumerate(outcome.verdicts if outcome else []):
            if verdict == "mismatch":
                for k in self._owners(parts, borders, scales, j):
                    found.setdefault(k, []).append(j)
        assert outcome is not None or not found  # noqa: S101  type narrowing
        culprits = [self._culprit(parts, k, found[k], outcome) for k in sorted(found, key=lambda k: -self._position(k))]
        return _merged(culprits)

    def _judged(self, parts: Any, borders: list[Any], scales: Float64Array) -> Outcome | None:
        """Check the parts whose outputs have a scale; None when there is none or they hold NaN or Inf."""
        if not scales.any():
            return None
        point = parts.point(borders, scales, *self._values)
        problem = self._problem_of(point)
        if not np.isfinite(problem.loss):
            return None
        usable = np.isfinite(problem.norms) & (point.summaries[:, 2] == 0)
        outcome = check_problem(problem, self._seed, self._settings, candidates=usable)
        self.evaluations += outcome.evaluations
        return outcome

    def _owners(self, parts: Any, borders: list[Any], scales: Float64Array, j: int) -> list[int]:
        """The calls at fault for a wrong tensor: the one a border enters, or those that read a weight wrongly."""
        if j < len(parts.borders):
            return [parts.owners[j]]
        makers = np.array(parts.makers)
        readers = [k for k in self._program.consumers(j - len(parts.borders)) if scales[makers == k].any()]
        if len(readers) < 2:
            return readers or [_OUTSIDE]
        alone = {k: self._judged(parts, borders, np.where(makers == k, scales, 0.0)) for k in readers}
        return [k for k, outcome in alone.items() if outcome is not None and outcome.verdicts[j] == "mismatch"]

    def _culprit(self, parts: Any, k: int, wrong: list[int], outcome: Any) -> Culprit:
        worst = max(wrong, key=lambda j: float(outcome.errors[j]))
        names = ["input"] * len(parts.borders) + [info.tensor for info in self._subject.tensors]
        labels = [parts.labels[j] for j in wrong if j < len(parts.labels) and parts.labels[j]]
        detail = f"wrong in what it does with {', '.join(labels)}" if labels else ""
        return replace(
            self._named(k, "backward", detail), parts=tuple(dict.fromkeys(names[j] for j in wrong)),
            factor=float(outcome.factors[worst]), error=float(outcome.errors[worst]), bar=float(outcome.bars[worst]),
        )  # fmt: skip

    def _named(self, k: int, kind: Any, detail: str) -> Culprit:
        """A call (or the loss) as a culprit."""
        if k == _OUTSIDE:
            return Culprit(layer="loss", kind=kind, detail=detail)
        operation = self._program.calls[k].operation
        return Culprit(layer=self._path(operation), layer_class=type(operation).__name__, kind=kind, detail=detail)

    def _position(self, k: int) -> float:
        return float("inf") if k == _OUTSIDE else float(self._program.calls[k].last_op)

    def _bad_data(self) -> Culprit | None:
        count = len(self._subject.variables)
        for info, value in zip(self._subject.tensors[count:], self._values[0][count:], strict=True):
            rows = _bad_rows(value)
            if rows:
                return Culprit(
                    layer="data", kind="forward", parts=(info.tensor,), detail=f"the input holds NaN or Inf in {rows}"
                )
        for value in self._values[1][len(self._subject.state) :]:
            rows = _bad_rows(value)
            if rows:
                return Culprit(
                    layer="labels", kind="forward", detail=f"the targets or weights hold NaN or Inf in {rows}"
                )
        for info, value in zip(self._subject.tensors[:count], self._values[0][:count], strict=True):
            if _bad_rows(value):
                return Culprit(layer=info.layer, layer_class=info.layer_class, kind="forward", parts=(info.tensor,),
                               detail=f"its weight {info.tensor} already holds NaN or Inf")  # fmt: skip
        return None

    def _path(self, operation: Any) -> str:
        return self._paths.get(id(operation), str(operation.name))


def _merged(culprits: Sequence[Culprit]) -> list[Culprit]:
    """One culprit per layer: a layer that is called twice is wrong once."""
    found: dict[str, Culprit] = {}
    for culprit in culprits:
        known = found.setdefault(culprit.layer, culprit)
        found[culprit.layer] = replace(known, parts=tuple(dict.fromkeys((*known.parts, *culprit.parts))))
    return list(found.values())


class _Naive:
    """A problem whose numeric side lets stop_gradient through."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.loss, self.scales, self.norms, self.sizes = problem.loss, problem.scales, problem.norms, problem.sizes

    def line(self, seed: int, part: Part | None = None) -> Any:
        return _NaiveLine(self._problem.line(seed, part))

    def jittered(self, size: float, seed: int) -> Any:
        return _Naive(self._problem.jittered(size, seed))


class _NaiveLine:
    def __init__(self, line: Any) -> None:
        self._line, self.slopes = line, line.slopes

    def losses(self, coefficients: Any) -> Any:
        return self._line.losses(coefficients, naive=True)

    def entry(self, j: int, index: int) -> float:
        return float(self._line.entry(j, index))


def _bad_rows(value: Any) -> str:
    """Which samples of an array hold NaN or Inf, in words; empty when none does."""
    import keras

    array = keras.ops.convert_to_numpy(value)
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return ""
    bad = ~np.isfinite(array)
    if array.ndim == 0:
        return "its only value"
    rows = np.flatnonzero(bad.reshape(len(array), -1).any(axis=1))
    return row_words(rows.tolist())


def _cut_words(kind: str) -> str:
    if kind == "StopGradient":
        return "cut by stop_gradient"
    return f"cut by {kind}, which has no gradient"
