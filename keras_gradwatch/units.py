"""Rules for activations: units that are dead, layers that are saturated.

Both read the looks at the activations, not the gradients: a layer may be three quarters dead while the loss falls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from keras_gradwatch.records import Activation, ActivationRecord, Finding, InputScale, TensorInfo, Window
from keras_gradwatch.signals import BoolArray, has_learned, is_going_nowhere, is_settled, listed

#: Mean of an input / its standard deviation from which it counts as shifted, and its size from which it counts as
#: unscaled. Our choice: pixels 0…1 have 0.8 and 1, pixels 0…255 have 255.
SHIFTED = 3.0
UNSCALED = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One layer in trouble: its latest activation, since when, and why."""

    activation: Activation
    share: float
    first_step: int
    before: ActivationRecord | None
    why: str
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadUnits:
    """Layers of which half the relu units or more are exactly zero for every sample: they cannot learn.

    A unit counts as dead when every one of the latest looks found it silent. What follows from a wholly dead layer
    (dead layers behind it, zero gradients before it) is not reported again.

    Quiet on: sparse activations whose units all answer to some sample; small layers of a model that learns all the
    same; outputs, unless all of them are silent.

    Attributes:
        share: share of a layer's units. AWS SageMaker Debugger: 50 % (``DeadRelu``); faultbench's definition, too.
        samples: samples that must find a unit silent. A unit active in one of twenty samples passes 100 of them once in
            170 times.
        looks: looks in a row.
        steps: training steps between the first and the last of them, unless the run is over.
        early: share from which half of the run need not be over: silent units may wake up while others learn.
        small: layers with fewer units are not told early, and left alone if the model learns: half of four units are
            silent by chance.
        learned: share of the loss that must be gone for that.
    """

    share: float = 0.5
    samples: int = 100
    looks: int = 3
    steps: int = 10
    early: float = 0.9
    small: int = 16
    learned: float = 0.5

    def __call__(self, window: Window) -> Sequence[Finding]:
        """One finding per cause, on the layer of which most is dead, with the other layers in the message."""
        looks = window.activations
        cases = [case for key in _keys(looks) if (case := self._case(window, key)) is not None]
        return [self._finding(window, group) for group in _groups(cases)]

    def _case(self, window: Window, key: _Key) -> _Case | None:
        seen = _sightings(window.activations, key)
        latest = seen[-1][1]
        dead = self._dead(seen, apart=0 if window.ended else self.steps)
        if dead is None or not dead.size:
            return None
        share, needed = float(dead.mean()), 1.0 if latest.output else self.share
        if latest.kind != "relu" or share < needed:
            return None
        if (share < self.early or latest.units < self.small) and not is_settled(window):
            return None
        if latest.units < self.small and share < 1.0 and has_learned(window, self.learned):
            return None
        was = [float((dead & activation.silent).sum() / dead.size) >= needed for _, activation in seen]
        start = len(was) - 1 - was[::-1].index(False) if False in was else -1
        first, before = seen[start + 1][0], seen[start][0] if start >= 0 else None
        why, advice = _cause_of_death(window, latest, dead, before)
        return _Case(
            activation=latest,
            share=share,
            first_step=_first_step(window, first, before),
            before=before,
            why=why,
            advice=advice,
        )

    def _dead(self, seen: Sequence[_Sighting], *, apart: int) -> BoolArray | None:
        """Units that were silent in each of the latest looks; ``None`` when there were not enough."""
        dead, samples = seen[-1][1].silent.copy(), 0
        for count, (look, activation) in enumerate(reversed(seen), start=1):
            dead &= activation.silent
            samples += look.samples
            enough = samples >= self.samples and count >= self.looks
            if enough and seen[-1][0].step - look.step >= apart:
                return dead
        return None

    def _finding(self, window: Window, group: Sequence[_Case]) -> Finding:
        worst = max(group, key=lambda case: case.share)
        activation = worst.activation
        also = tuple(f"{case.activation.layer} ({_count(case)})" for case in group if case is not worst)
        return Finding(
            finding="dead_units",
            layer=activation.layer,
            first_step=min(case.first_step for case in group),
            last_step=window.activations[-1].step,
            severity="error" if worst.share == 1.0 else "warning",
            value=worst.share,
            limit=self.share,
            message=(
                f"{_count(worst)} units ({worst.share:.0%}) of {_place(activation)} give exactly zero for every "
                f"sample: {worst.why}" + (f"; also {listed(also)}" if also else "")
            ),
            advice=worst.advice,
            tensors=_unique(name for case in group for name in case.activation.own),
            explains=(*_unique(n for case in group for n in _spoiled(window, case.activation)), *_inputs(window)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturated:
    """Hidden sigmoid or tanh layers whose outputs lie at the limits of their range, where the slope is almost zero.

    Quiet on: output layers, whose limits are the goal; gates of recurrent layers; models that have learned or whose
    loss falls, such as those with a binary code inside.

    Attributes:
        share: share of a layer's entries within 1 % of a limit. DeepDiagnosis (Wardat et al. 2022) takes 50 % with
            |z| ≥ 5, alone; healthy layers reach that, so here the loss must go nowhere besides.
        improved: share of the loss that must be gone to be improving.
        learned: what the predictions must know of the targets to have learned; see ``signals.knowledge``.
        looks: looks in a row.
        steps: training steps between the first and the last of them.
    """

    share: float = 0.5
    improved: float = 0.25
    learned: float = 0.5
    looks: int = 3
    steps: int = 10

    def __call__(self, window: Window) -> Sequence[Finding]:
        """One finding per cause, on the most saturated layer, with the other layers in the message."""
        if not is_going_nowhere(window, improved=self.improved, known=self.learned):
            return ()
        cases = [case for key in _keys(window.activations) if (case := self._case(window, key)) is not None]
        return [self._finding(window, group) for group in _groups(cases)]

    def _case(self, window: Window, key: _Key) -> _Case | None:
        seen = _sightings(window.activations, key)
        look, latest = seen[-1]
        if latest.kind == "relu" or latest.output or not latest.at_limit >= self.share:
            return None
        was = [activation.at_limit >= self.share for _, activation in seen]
        start = len(was) - 1 - was[::-1].index(False) if False in was else -1
        first, before = seen[start + 1][0], seen[start][0] if start >= 0 else None
        if len(seen) - start - 1 < self.looks or look.step - first.step < self.steps:
            return None
        why, advice = _cause_of_saturation(window, latest, before)
        return _Case(
            activation=latest,
            share=latest.at_limit,
            first_step=_first_step(window, first, before),
            before=before,
            why=why,
            advice=advice,
        )

    def _finding(self, window: Window, group: Sequence[_Case]) -> Finding:
        worst = max(group, key=lambda case: case.share)
        activation = worst.activation
        also = tuple(f"{case.activation.layer} ({case.share:.0%})" for case in group if case is not worst)
        return Finding(
            finding="saturated",
            layer=activation.layer,
            first_step=min(case.first_step for case in group),
            last_step=window.activations[-1].step,
            value=worst.share,
            limit=self.share,
            message=(
                f"{worst.share:.0%} of the outputs of {_place(activation)} are within 1 % of a limit of "
                f"{activation.kind}, where it has almost no slope: {worst.why}"
                + (f"; also {listed(also)}" if also else "")
            ),
            advice=worst.advice,
            tensors=_unique(name for case in group for name in case.activation.own),
            explains=(*_unique(n for case in group for n in case.activation.upstream), *_inputs(window)),
        )


_Key = tuple[str, str, int]
_Sighting = tuple[ActivationRecord, Activation]


def _keyed(look: ActivationRecord) -> dict[_Key, Activation]:
    """The activations of a look by layer, kind and number within the layer."""
    found: dict[_Key, Activation] = {}
    for activation in look.activations:
        number = sum(key[:2] == (activation.layer, activation.kind) for key in found)
        found[activation.layer, activation.kind, number] = activation
    return found


def _keys(looks: Sequence[ActivationRecord]) -> tuple[_Key, ...]:
    return tuple(_keyed(looks[-1])) if looks else ()


def _sightings(looks: Sequence[ActivationRecord], key: _Key) -> list[_Sighting]:
    """The looks that saw this activation, oldest first."""
    return [(look, found) for look in looks if (found := _keyed(look).get(key)) is not None]


def _first_step(window: Window, first: ActivationRecord, before: ActivationRecord | None) -> int:
    """The look's step, or the step before if the run began with it: a model may be built inside its first step."""
    began = int(window.steps[0]) if window.steps.size else first.step
    return began if before is None and first.step - began == 1 else first.step


def _groups(cases: Sequence[_Case]) -> list[list[_Case]]:
    """Cases with one cause together: the same reason, or fed by a layer that lets nothing through."""
    groups: list[list[_Case]] = []
    for case in cases:
        for group in groups:
            if any(case.why == other.why or _feeds_nothing(other, case) for other in group):
                group.append(case)
                break
        else:
            groups.append([case])
    return groups


def _feeds_nothing(case: _Case, later: _Case) -> bool:
    own = case.activation.own
    return case.share == 1.0 and bool(own) and set(own) <= set(later.activation.upstream)


def _spoiled(window: Window, activation: Activation) -> tuple[str, ...]:
    """Weights that a dead layer keeps from learning: those before it, and those of the next layer, fed with zeros."""
    depth = max((info.depth for info in window.tensors if info.layer == activation.owner), default=-1)
    after = min((info.depth for info in window.tensors if info.depth > depth), default=-1)
    return (*activation.upstream, *(info.tensor for info in window.tensors if info.depth == after))


def _inputs(window: Window) -> tuple[str, ...]:
    return tuple(scale.name for scale in window.activations[-1].inputs)


def _cause_of_death(
    window: Window, activation: Activation, dead: BoolArray, before: ActivationRecord | None
) -> tuple[str, str]:
    """Why the units died, and what to try."""
    if before is not None:
        moved = _largest_update(window, activation, since=before.step)
        how = f"; one update moved its weights by {moved:.2g} of their size" if moved > 0 else ""
        why = f"they died after step {before.step}{how}"
        return why, f"{_smaller_rate(window)}, clipnorm, or leaky_relu or gelu"
    bias, brought = activation.bias[dead], activation.ceiling[dead] - activation.bias[dead]
    if np.isfinite(bias).all() and np.median(bias) < 0 < np.median(brought):
        why = f"their biases (median {np.median(bias):.3g}) outweigh all that enters (at most {brought.max():.3g})"
        return why, "start the biases at 0 (bias_initializer)"
    if (scale := _bad_input(window, activation)) is not None:
        return f"the input {_scale_words(scale)}", "standardise the input: mean 0, standard deviation 1"
    initializer = _initializer(window, activation)
    why = f"from the first step, as initialised{f' ({initializer})' if initializer else ''}"
    return why, "he_normal, normalisation before the activation, or leaky_relu or gelu; fewer or wider layers"


def _cause_of_saturation(window: Window, activation: Activation, before: ActivationRecord | None) -> tuple[str, str]:
    """Why the layer is saturated, and what to try."""
    if (scale := _bad_input(window, activation)) is not None:
        return f"the input {_scale_words(scale)}", "standardise the input: mean 0, standard deviation 1"
    if before is not None:
        moved = _largest_update(window, activation, since=before.step)
        how = f"; one update moved its weights by {moved:.2g} of their size" if moved > 0 else ""
        return f"since step {before.step}{how}", f"{_smaller_rate(window)}, clipnorm, or relu or gelu with he_normal"
    initializer = _initializer(window, activation)
    why = f"from the first step, as initialised{f' ({initializer})' if initializer else ''}"
    return why, "smaller initial weights and biases at 0 (glorot_uniform), or normalisation before the activation"


def _bad_input(window: Window, activation: Activation) -> InputScale | None:
    """The model's input, if it enters this layer and is far from mean 0 and deviation 1."""
    if set(activation.upstream) - set(activation.own):
        return None
    for scale in window.activations[-1].inputs:
        if abs(scale.mean) > SHIFTED * max(scale.std, 1.0) or scale.largest > UNSCALED:
            return scale
    return None


def _scale_words(scale: InputScale) -> str:
    return (
        f"{scale.name} has mean {scale.mean:.3g}, standard deviation {scale.std:.3g}, largest value {scale.largest:.3g}"
    )


def _largest_update(window: Window, activation: Activation, *, since: int) -> float:
    """Largest update of the layer's weights in one step, relative to their size; 0 when unknown."""
    mine = [i for i, info in enumerate(window.tensors) if info.tensor in activation.own and len(info.shape) >= 2]
    ratios = window.column("update_ratio")[window.steps >= since][:, mine]
    return float(np.nanmax(ratios)) if np.isfinite(ratios).any() else 0.0


def _smaller_rate(window: Window) -> str:
    rate = float(window.learning_rates[-1]) if window.learning_rates.size else float("nan")
    return f"a learning rate well below {rate:.1g}" if rate > 0 else "a lower learning rate"


def _initializer(window: Window, activation: Activation) -> str:
    def is_kernel(info: TensorInfo) -> bool:
        return info.tensor in activation.own and len(info.shape) >= 2

    return next((info.initializer for info in window.tensors if is_kernel(info)), "")


def _count(case: _Case) -> str:
    return f"{round(case.share * case.activation.units)} of {case.activation.units}"


def _place(activation: Activation) -> str:
    """The layer, and where its weights are if not in it."""
    inside = activation.owner == activation.layer or activation.owner.startswith(f"{activation.layer}/")
    return activation.layer if inside or not activation.owner else f"{activation.layer} (after {activation.owner})"


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
