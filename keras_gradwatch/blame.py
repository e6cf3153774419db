"""From wrong tensors to the layer at fault: each suspect layer is tried alone, between its own inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_gradwatch.check import CheckSettings, Part, Problem, check_problem
from keras_gradwatch.probe import Subject, layer_paths
from keras_gradwatch.records import Culprit

#: At most this many layers are tried alone in one check: the nearest the loss first.
_MOST_LAYERS = 64


class Blame:
    """Looks for the culprit behind one check's verdicts, in the traced program of that check."""

    def __init__(
        self, root: Any, subject: Subject, program: Any, values: tuple[list[Any], list[Any]], seed: int,
        settings: CheckSettings, problem_of: Callable[[Any], Problem],
    ) -> None:  # fmt: skip
        self._root, self._subject, self._program, self._values = root, subject, program, values
        self._seed, self._settings, self._problem_of = seed, settings, problem_of
        self._paths = layer_paths(root)
        self.evaluations = 0

    def mismatch(self, wrong: Sequence[bool]) -> list[Culprit]:
        """Layers (or the loss) whose own backward disagrees with their forward, nearest the loss first."""
        culprits: list[Culprit] = []
        loss = self._try(self._program.loss_alone(), [f"output {k}" for k in range(99)])
        if loss is not None:
            culprits.append(self._culprit("loss", "", loss))
        unexplained = {i for i, bad in enumerate(wrong) if bad}
        if culprits:
            return culprits
        tried = 0
        for index in self._candidates():
            if not unexplained or tried >= _MOST_LAYERS:
                break
            upstream = self._program.moving_above(index)
            if not unexplained & upstream:
                continue
            tried += 1
            traced = self._program.layer(index, self._seed + index)
            if traced is None:
                continue
            names = ["input"] * traced.inputs + [self._subject.tensors[i].tensor for i in traced.weights]
            found = self._try(traced, names)
            if found is None:
                continue
            operation = self._program.calls[index].operation
            culprit = self._culprit(self._path(operation), type(operation).__name__, found)
            if culprit.layer not in {c.layer for c in culprits}:
                culprits.append(culprit)
            unexplained -= upstream if "input" in culprit.parts else {
                i for i in traced.weights if self._subject.tensors[i].tensor in culprit.parts
            }
        return culprits

    def nonfinite(self, loss: float) -> list[Culprit]:
        """What made the first NaN or Inf: data, labels, a layer's value, the loss, or a layer's backward."""
        data = self._bad_data()
        if data:
            return [data]
        flags = self._program.finite(*self._values)
        leaves = [i for i in range(len(flags)) if not self._program.children(i)]
        for i in leaves:  # calls come in execution order
            inputs, outputs, _, _ = flags[i]
            if inputs and not outputs:
                return [self._layer_culprit(i, "forward", "its output holds NaN or Inf although its inputs are finite")]
        if not np.isfinite(loss):
            return [Culprit(layer="loss", kind="forward", detail="the loss is NaN or Inf although the model's outputs are finite")]
        for i in reversed(leaves):
            _, _, outputs, inputs = flags[i]
            if outputs and not inputs:
                detail = "its backward gives NaN or Inf although the gradient of its output is finite"
                return [self._layer_culprit(i, "backward", detail)]
        return [Culprit(layer="loss", kind="backward", detail="the gradient of the loss is NaN or Inf at finite outputs")]

    def cuts(self, indices: Sequence[int]) -> list[Culprit]:
        """Where the gradient of disconnected tensors stops, one per place."""
        culprits: dict[str, Culprit] = {}
        for i in indices:
            if not self._program.reached[i]:
                continue
            call, kind = self._program.cut(i)
            if not kind:
                continue
            layer = self._path(call.operation) if call is not None else "loss"
            name = type(call.operation).__name__ if call is not None else ""
            part = self._subject.tensors[i].tensor
            before = culprits.get(layer)
            parts = (*before.parts, part) if before else (part,)
            culprits[layer] = Culprit(layer=layer, layer_class=name, kind="cut", parts=parts, detail=_cut_words(kind))
        return list(culprits.values())

    def cut_reason(self, index: int) -> str:
        """Why a tensor has no gradient, in words."""
        if not self._program.reached[index]:
            return "the loss does not depend on it"
        call, kind = self._program.cut(index)
        if not kind:
            return "the loss depends on it, but its gradient is None"
        place = f" in layer {self._path(call.operation)}" if call is not None else ""
        return f"{_cut_words(kind)}{place}"

    def stop_place(self, index: int) -> str:
        """Layer of the stop_gradient a tensor passes, for messages; empty when it cannot be told."""
        call = self._program.stop_call(index)
        return f" (layer {self._path(call.operation)})" if call is not None else ""

    def declared(self, problem: Problem, members: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Tensors whose plain numeric slope, stop_gradient let through, differs from their gradient."""
        naive = check_problem(_Naive(problem), self._seed + 5, self._settings, candidates=members)
        self.evaluations += naive.evaluations
        return np.array([verdict == "mismatch" for verdict in naive.verdicts])

    def _try(self, traced: Any, names: Sequence[str]) -> _Found | None:
        """Check one scalar alone; None when it is right (or cannot be judged)."""
        if traced is None:
            return None
        inner = self._program.values([*traced.moving, *traced.fixed], *self._values)
        point = traced.point(inner[: len(traced.moving)], inner[len(traced.moving) :])
        problem = self._problem_of(point)
        if not np.isfinite(problem.loss) or not np.isfinite(problem.norms).all():
            return None
        outcome = check_problem(problem, self._seed, self._settings)
        self.evaluations += outcome.evaluations
        bad = [k for k, verdict in enumerate(outcome.verdicts) if verdict == "mismatch"]
        if not bad:
            return None
        worst = max(bad, key=lambda k: float(outcome.errors[k]))
        parts = tuple(dict.fromkeys(names[k] for k in bad))
        return parts, float(outcome.factors[worst]), float(outcome.errors[worst]), float(outcome.bars[worst])

    def _candidates(self) -> list[int]:
        """Call indices, leaves before containers, nearest the loss first."""
        calls = range(len(self._program.calls))
        leaves = [i for i in calls if not self._program.children(i)]
        containers = [i for i in calls if self._program.children(i) and self._program.calls[i].parent != -1]
        order = sorted(leaves, key=lambda i: -self._program.calls[i].last_op)
        rest = sorted(containers, key=lambda i: self._program.calls[i].last_op - self._program.calls[i].first_op)
        top = [i for i in calls if self._program.children(i) and self._program.calls[i].parent == -1]
        return [*order, *rest, *top]

    def _culprit(self, layer: str, name: str, found: _Found) -> Culprit:
        parts, factor, error, bar = found
        return Culprit(layer=layer, layer_class=name, parts=parts, factor=factor, error=error, bar=bar)

    def _layer_culprit(self, index: int, kind: Any, detail: str) -> Culprit:
        operation = self._program.calls[index].operation
        return Culprit(layer=self._path(operation), layer_class=type(operation).__name__, kind=kind, detail=detail)

    def _bad_data(self) -> Culprit | None:
        count = len(self._subject.variables)
        for info, value in zip(self._subject.tensors[count:], self._values[0][count:], strict=True):
            rows = _bad_rows(value)
            if rows:
                return Culprit(layer="data", kind="forward", parts=(info.tensor,), detail=f"the input holds NaN or Inf in {rows}")
        for value in self._values[1][len(self._subject.state) :]:
            rows = _bad_rows(value)
            if rows:
                return Culprit(layer="labels", kind="forward", detail=f"the targets or weights hold NaN or Inf in {rows}")
        for info, value in zip(self._subject.tensors[:count], self._values[0][:count], strict=True):
            if _bad_rows(value):
                return Culprit(layer=info.layer, layer_class=info.layer_class, kind="forward", parts=(info.tensor,),
                               detail=f"its weight {info.tensor} already holds NaN or Inf")  # fmt: skip
        return None

    def _path(self, operation: Any) -> str:
        return self._paths.get(id(operation), operation.name)


_Found = tuple[tuple[str, ...], float, float, float]


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


def _bad_rows(value: Any) -> str:
    """Which samples of an array hold NaN or Inf, in words; empty when none does."""
    array = np.asarray(value)
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return ""
    bad = ~np.isfinite(array)
    if array.ndim == 0:
        return "its only value"
    rows = np.flatnonzero(bad.reshape(len(array), -1).any(axis=1))
    shown = ", ".join(str(r) for r in rows[:5])
    return f"row{'s' if len(rows) > 1 else ''} {shown}{' …' if len(rows) > 5 else ''} of the batch"


def _cut_words(kind: str) -> str:
    if kind == "StopGradient":
        return "cut by stop_gradient"
    return f"cut by {kind}, which has no gradient"
