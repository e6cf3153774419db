"""Rules for what is wrong in itself, however training goes: wrong, imprecise, non-finite or missing gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keras_gradwatch.marks import PSEUDO_LAYERS
from keras_gradwatch.records import CheckResult, Culprit, Finding, TensorInfo, Window
from keras_gradwatch.signals import BoolArray, connected, layers_of, listed
from keras_gradwatch.words import culprit_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A layer whose backward pass disagrees with its forward pass, as the newest check in the window saw it."""

    def __call__(self, window: Window) -> Sequence[Finding]:
        """One finding per layer to blame, or one on the deepest wrong layer when no single layer could be blamed."""
        check = window.check
        if check is None or not check.awake or not _with_verdict(check, "mismatch"):
            return ()
        culprits = [c for c in check.culprits if c.kind == "backward" and math.isfinite(c.error)]
        if not culprits:
            return [self._unblamed(check, step=window.check_step)]
        return [self._blamed(check, culprit, step=window.check_step) for culprit in culprits]

    def _blamed(self, check: CheckResult, culprit: Culprit, *, step: int) -> Finding:
        depth = max((info.depth for info in check.tensors if info.layer == culprit.layer), default=math.inf)
        upstream = tuple(info.tensor for info in _with_verdict(check, "mismatch") if info.depth <= depth)
        right = _right_downstream(check)
        own = tuple(part for part in culprit.parts if part != "input")
        sentences = [culprit_words(culprit)]
        sentences += [f"wrong upstream: {listed(upstream)}"] if upstream else []
        sentences += [f"right downstream: {listed(right)}"] if right else []
        return Finding(
            finding="mismatch",
            layer=culprit.layer,
            tensor=own[0] if own else "",
            first_step=step,
            last_step=step,
            severity="error",
            value=culprit.error,
            limit=culprit.bar,
            message="; ".join(sentences),
            advice=_mismatch_advice(culprit),
            tensors=tuple(dict.fromkeys((*upstream, *own))),
        )

    def _unblamed(self, check: CheckResult, *, step: int) -> Finding:
        wrong = _with_verdict(check, "mismatch")
        deepest = max(wrong, key=lambda info: info.depth)
        row = next(row for row in check.checks if row.tensor == deepest.tensor)
        names = tuple(info.tensor for info in wrong)
        return Finding(
            finding="mismatch",
            layer=deepest.layer,
            tensor=deepest.tensor,
            first_step=step,
            last_step=step,
            severity="error",
            value=row.error,
            limit=row.bar,
            message=(
                f"wrong gradient: {listed(names)} (error {row.error:.1e}, bar {row.bar:.0e}); no single layer could be "
                f"blamed, {deepest.layer} is the wrong one nearest the loss"
            ),
            advice=f"run check_layer on {deepest.layer} and the layers after it; look for custom gradients in the loss",
            tensors=names,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Imprecise:
    """Gradients whose formula is right but whose training dtype loses them: overflow, underflow, cancellation."""

    def __call__(self, window: Window) -> Sequence[Finding]:
        """One finding, on the first such layer in network order, listing every such tensor."""
        check = window.check
        tensors = _with_verdict(check, "imprecise") if check else ()
        if check is None or not tensors:
            return ()
        names = tuple(info.tensor for info in tensors)
        rows = [row for row in check.checks if row.verdict == "imprecise"]
        worst = max((row.rounding_error for row in rows if not math.isnan(row.rounding_error)), default=math.nan)
        reason = rows[0].reason or "the gradient in the training dtype differs from the float64 one"
        return [
            Finding(
                finding="imprecise",
                layer=tensors[0].layer,
                tensor=names[0],
                first_step=window.check_step,
                last_step=window.check_step,
                value=worst,
                message=f"{listed(names)}: the formula is right, the arithmetic is not good enough: {reason}",
                advice=(
                    "train these layers in float32, scale the loss (LossScaleOptimizer) or the data, "
                    "or rewrite the expression in a stable form"
                ),
                tensors=names,
            )
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """NaN or Inf in the loss, a gradient or a weight.

    With mixed precision, a loss-scaling optimizer skips steps whose scaled gradient overflows: a few in a row while it
    looks for its scale are its normal work, and only a run that keeps skipping is reported.

    Attributes:
        skip_share: share of the window's steps that may be skipped. Our choice: Keras halves the scale at each overflow
            and doubles it every 2,000 steps (``LossScaleOptimizer``), so a settled run skips under 0.1 %.
        skip_streak: skipped steps in a row that pass as the search for the scale. Our choice: from the initial 2^15
            ten halvings lead to 32, where only an unhealthy gradient still overflows float16.
    """

    skip_share: float = 0.2
    skip_streak: int = 10

    def __call__(self, window: Window) -> Sequence[Finding]:
        """One finding, at the first non-finite step, on whatever produced the first non-finite value."""
        bad, lost = _bad_tensors(window), window.loss_known & ~np.isfinite(window.losses)
        skipped = bad.any(axis=1) & ~lost & ~_weights_moved(window)
        events = bad.any(axis=1) | lost
        if not self._keeps_skipping(skipped):
            events &= ~skipped
        if events.any():
            return [self._from_steps(window, bad, lost, events, all_skipped=bool(skipped[events].all()))]
        if window.check is not None and _with_verdict(window.check, "nonfinite"):
            return [self._from_check(window.check, step=window.check_step)]
        return ()

    def _keeps_skipping(self, skipped: BoolArray) -> bool:
        longest = max((len(run) for run in _runs(skipped)), default=0)
        return bool(longest >= self.skip_streak and skipped.mean() >= self.skip_share)

    def _from_steps(
        self, window: Window, bad: BoolArray, lost: BoolArray, events: BoolArray, *, all_skipped: bool
    ) -> Finding:
        first, last = np.flatnonzero(events)[[0, -1]]
        step, names = int(window.steps[first]), tuple(window.tensors[i].tensor for i in np.flatnonzero(bad[first]))
        culprits = () if all_skipped else window.culprits or _nonfinite_culprits(window.check)
        if all_skipped:
            layer, why = _deepest(window, bad[first]), "loss scaling keeps skipping steps, so the weights do not move"
        elif culprits:
            layer, why = culprits[0].layer, culprit_words(culprits[0])
        else:
            layer, why = _pattern(window, bad[first], lost=bool(lost[first]))
        state = "the loss is NaN or Inf" if lost[first] else "NaN or Inf, though the loss is still finite"
        return Finding(
            finding="nonfinite",
            layer=layer,
            tensor=names[0] if names and not lost[first] else "",
            first_step=step,
            last_step=int(window.steps[last]),
            severity="error",
            value=float(bad[first].sum()),
            message=f"step {step}: {state}; {why}{f'; hit: {listed(names)}' if names else ''}",
            advice=_nonfinite_advice(layer, culprits, all_skipped=all_skipped),
            tensors=names,
            samples=culprits[0].samples if culprits else (),
        )

    def _from_check(self, check: CheckResult, *, step: int) -> Finding:
        hit, culprits = _with_verdict(check, "nonfinite"), _nonfinite_culprits(check)
        deepest = max(hit, key=lambda info: info.depth).layer
        layer = culprits[0].layer if culprits else deepest
        why = culprit_words(culprits[0]) if culprits else f"the fault lies just after {deepest}"
        names = tuple(info.tensor for info in hit)
        return Finding(
            finding="nonfinite",
            layer=layer,
            tensor=names[0],
            first_step=step,
            last_step=step,
            severity="error",
            value=float(len(names)),
            message=f"step {step}: the gradient check met NaN or Inf; {why}; hit: {listed(names)}",
            advice=_nonfinite_advice(layer, culprits, all_skipped=False),
            tensors=names,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected:
    """Trainable weights that the loss does not reach: their gradient is None.

    A block behind learning weights that is unused, or stopped by ``stop_gradient``, looks meant (a spare head, a target
    network) and is only told; everything before a cut through the whole network is a warning.
    """

    def __call__(self, window: Window) -> Sequence[Finding]:
        """One finding per run of neighbouring weights, on the layer that cuts it off when the check found that."""
        return [self._finding(window, block) for block in _runs(_cut_off(window))]

    def _finding(self, window: Window, block: range) -> Finding:
        tensors = window.tensors[block.start : block.stop]
        names = tuple(info.tensor for info in tensors)
        rows = window.check.checks if window.check else ()
        reason = next((row.reason for row in rows if row.tensor in names and row.reason), "")
        culprit = _cutting_culprit(window.check, names)
        layer = culprit.layer if culprit else tensors[-1].layer
        why = culprit_words(culprit) if culprit else reason or _whereabouts(window, block)
        seen = (int(window.steps[0]), int(window.steps[-1])) if window.steps.size else (window.check_step,) * 2
        harmless = self._harmless(window, block, f"{why} {reason}")
        return Finding(
            finding="disconnected",
            layer=layer,
            tensor=names[0] if len(names) == 1 else "",
            first_step=seen[0],
            last_step=seen[1],
            severity="info" if harmless else "warning",
            value=float(len(names)),
            message=f"the loss does not reach {listed(names)}, the gradient is None: {why}",
            advice=(
                "if this is meant, set trainable = False there; otherwise let the loss depend on it"
                if harmless
                else "look for stop_gradient, argmax, round, a cast to int or NumPy code on the way to the loss; "
                "if it is meant, set trainable = False"
            ),
            tensors=names,
        )

    def _harmless(self, window: Window, block: range, why: str) -> bool:
        reaches_before = bool(connected(window)[: block.start].any())
        return reaches_before and any(word in why for word in ("unused", "does not depend", "stop_gradient"))


def _with_verdict(check: CheckResult, verdict: str) -> tuple[TensorInfo, ...]:
    return tuple(info for info, row in zip(check.tensors, check.checks, strict=True) if row.verdict == verdict)


def _right_downstream(check: CheckResult) -> tuple[str, ...]:
    """Layers nearer the loss than every wrong tensor, whose weights are right."""
    deepest = max(info.depth for info in _with_verdict(check, "mismatch"))
    return layers_of(tuple(i for i in _with_verdict(check, "ok") if i.role == "weight" and i.depth > deepest))


def _mismatch_advice(culprit: Culprit) -> str:
    if culprit.layer in PSEUDO_LAYERS:
        return "compare the loss's custom gradient with its value: compute_gradient_error(loss_of_y_pred, [y_pred])"
    getter = "".join(f'.get_layer("{name}")' for name in culprit.layer.split("/"))
    advice = (
        f"compare {culprit.layer_class or culprit.layer}'s custom gradient with its call; "
        f"check_layer(model{getter}, x) shows it alone"
    )
    if culprit.factor < 0:
        advice += f'; if it reverses gradients on purpose: surrogates=("{culprit.layer}",)'
    return advice


def _bad_tensors(window: Window) -> BoolArray:
    """Tensors with NaN or Inf in the gradient or the weight, shape ``[S, V]``; untracked steps have none."""
    count = window.column("nonfinite_count")
    broken_weight = np.isfinite(count) & ~np.isfinite(window.column("weight_norm"))
    return np.asarray((count > 0) | broken_weight, dtype=np.bool_)


def _weights_moved(window: Window) -> BoolArray:
    """Steps whose update changed, or broke, any weight, shape ``[S]``."""
    tracked = np.isfinite(window.column("nonfinite_count"))
    return np.asarray((tracked & (window.column("update_ratio") != 0.0)).any(axis=1), dtype=np.bool_)


def _nonfinite_culprits(check: CheckResult | None) -> tuple[Culprit, ...]:
    """The check's culprits for NaN and Inf; a wrong but finite backward elsewhere is another story."""
    if check is None or not _with_verdict(check, "nonfinite"):
        return ()
    return tuple(culprit for culprit in check.culprits if culprit.kind != "cut" and not math.isfinite(culprit.error))


def _pattern(window: Window, bad: BoolArray, *, lost: bool) -> tuple[str, str]:
    """Layer and reason read from which tensors were hit first, when nothing better is known."""
    if lost or not bad.any():
        return "loss", "it came up in the forward pass or in the loss itself"
    layer = _deepest(window, bad)
    return layer, f"the fault lies just after {layer}, the hit layer nearest the loss"


def _deepest(window: Window, bad: BoolArray) -> str:
    return max((window.tensors[i] for i in np.flatnonzero(bad)), key=lambda info: info.depth).layer


def _nonfinite_advice(layer: str, culprits: tuple[Culprit, ...], *, all_skipped: bool) -> str:
    if all_skipped:
        return "let this part run in float32, or lower the learning rate: some gradient overflows float16 at any scale"
    if layer in ("data", "labels", "sample_weight"):
        return f"clean the {layer.replace('_', ' ')}: drop or replace what is NaN or Inf"
    if not culprits:
        return (
            "look there for log, sqrt, division or a power at 0 without an epsilon; "
            "if the gradients grew before, lower the learning rate or set clipnorm"
        )
    if culprits[0].kind == "forward" and layer != "loss":
        return f"keep what enters {layer} in range (scaled inputs, a lower learning rate) or add an epsilon"
    return f"add an epsilon to log, sqrt, division or powers in {layer}; a where must be safe in both branches"


def _cut_off(window: Window) -> BoolArray:
    """Weights without a gradient at every step, or called disconnected by the check, shape ``[V]``."""
    never = ~window.connected.any(axis=0) if window.steps.size else np.zeros(len(window.tensors), dtype=np.bool_)
    checked = {info.tensor for info in _with_verdict(window.check, "disconnected")} if window.check else set()
    # A gradient at every step outweighs an older check.
    by_check = np.array([info.tensor in checked for info in window.tensors], dtype=np.bool_) & ~connected(window)
    return np.asarray(never | by_check, dtype=np.bool_)


def _whereabouts(window: Window, block: range) -> str:
    layer = window.tensors[block.stop - 1].layer
    after = next((info.layer for info in window.tensors[block.stop :]), "")
    return f"the cut lies between {layer} and {after}" if after else f"the loss does not use what {layer} gives"


def _cutting_culprit(check: CheckResult | None, names: tuple[str, ...]) -> Culprit | None:
    """The culprit that cuts these tensors off: one that names any of them, or the only one there is."""
    cuts = [culprit for culprit in check.culprits if culprit.kind == "cut"] if check else []
    naming = [culprit for culprit in cuts if set(names) & set(culprit.parts)]
    unnamed = [culprit for culprit in cuts if not culprit.parts]
    return next(iter(naming), unnamed[0] if len(cuts) == len(unnamed) == 1 else None)


def _runs(mask: BoolArray) -> list[range]:
    """Runs of True as index ranges."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [range(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
