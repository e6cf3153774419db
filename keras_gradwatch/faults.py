"""Rules for what is wrong in itself, whatever the training looks like: wrong, imprecise, non-finite or missing gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keras_gradwatch.records import CheckResult, Culprit, Finding, TensorInfo, Window
from keras_gradwatch.signals import BoolArray, connected, layers_of, listed

#: Culprits that are not layers.
PSEUDO_LAYERS = ("data", "labels", "loss", "sample_weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A layer whose backward pass disagrees with its forward pass, as the newest gradient check of the window saw it."""

    def __call__(self, window: Window) -> Sequence[Finding]:
        """One finding per layer to blame, or one on the deepest wrong layer when no single layer could be blamed."""
        check = window.check
        if check is None or not check.awake or not _verdict_tensors(check, "mismatch"):
            return ()
        culprits = [culprit for culprit in check.culprits if culprit.kind == "backward" and math.isfinite(culprit.error)]
        if culprits:
            return [self._blamed(check, culprit, step=window.check_step) for culprit in culprits]
        return [self._unblamed(check, step=window.check_step)]

    def _blamed(self, check: CheckResult, culprit: Culprit, *, step: int) -> Finding:
        depth = max((info.depth for info in check.tensors if info.layer == culprit.layer), default=None)
        wrong = _verdict_tensors(check, "mismatch")
        upstream = tuple(info for info in wrong if depth is None or info.depth <= depth)
        right = _right_downstream(check, wrong)
        parts = " and ".join(f"its {part}" if part == "input" else part for part in culprit.parts) or "its input"
        sentences = [f"{_title(culprit)}: its backward {_factor_words(culprit.factor)} w.r.t. {parts}{_error_words(culprit)}"]
        sentences += [f"wrong upstream: {listed(tuple(info.tensor for info in upstream))}"] if upstream else []
        sentences += [f"right downstream: {listed(layers_of(right))}"] if right else []
        sentences += [culprit.detail] if culprit.detail else []
        marked = dict.fromkeys((*(info.tensor for info in upstream), *(p for p in culprit.parts if p != "input")))
        return Finding(
            finding="mismatch",
            layer=culprit.layer,
            tensor=next((part for part in culprit.parts if part != "input"), ""),
            first_step=step,
            last_step=step,
            severity="error",
            value=culprit.error,
            limit=culprit.bar,
            message="; ".join(sentences),
            advice=_mismatch_advice(culprit),
            tensors=tuple(marked),
        )

    def _unblamed(self, check: CheckResult, *, step: int) -> Finding:
        wrong = _verdict_tensors(check, "mismatch")
        deepest = max(wrong, key=lambda info: info.depth)
        verdicts = {row.tensor: row for row in check.checks}
        row = verdicts[deepest.tensor]
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
                f"the gradient of {listed(tuple(info.tensor for info in wrong))} is wrong (error {row.error:.1e}, bar "
                f"{row.bar:.0e}), and no single layer could be blamed; {deepest.layer} is the wrong one nearest the loss"
            ),
            advice=f"run check_layer on {deepest.layer} and on the layers after it, and check custom gradients in the loss",
            tensors=tuple(info.tensor for info in wrong),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Imprecise:
    """Gradients whose formula is right but whose training dtype loses them: overflow, underflow, cancellation."""

    def __call__(self, window: Window) -> Sequence[Finding]:
        """One finding, on the first such layer in network order, listing every such tensor."""
        tensors = _verdict_tensors(window.check, "imprecise") if window.check else ()
        if not tensors or window.check is None:
            return ()
        rows = {row.tensor: row for row in window.check.checks}
        first = rows[tensors[0].tensor]
        worst = max((rows[info.tensor].rounding_error for info in tensors), key=lambda e: -1.0 if math.isnan(e) else e)
        reason = first.reason or "the gradient in the training dtype differs from the float64 one"
        return [
            Finding(
                finding="imprecise",
                layer=tensors[0].layer,
                tensor=tensors[0].tensor,
                first_step=window.check_step,
                last_step=window.check_step,
                value=worst,
                message=(
                    f"{listed(tuple(info.tensor for info in tensors))}: the formula is right, the arithmetic is not good "
                    f"enough (rounding error {worst:.1e}): {reason}"
                ),
                advice=(
                    "train these layers in float32, scale the loss (LossScaleOptimizer) or the data, "
                    "or rewrite the expression in a stable form"
                ),
                tensors=tuple(info.tensor for info in tensors),
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
        skip_streak: skipped steps in a row that pass as the search for the scale. Our choice: from the initial 2^15, ten
            halvings in a row leave a scale of 32, where only an unhealthy gradient still overflows float16.
    """

    skip_share: float = 0.2
    skip_streak: int = 10

    def __call__(self, window: Window) -> Sequence[Finding]:
        """One finding, at the first non-finite step, on whatever produced the first non-finite value."""
        bad, lost = self._bad_tensors(window), window.loss_known & ~np.isfinite(window.losses)
        skipped = bad.any(axis=1) & ~lost & (window.column("update_ratio") == 0.0).any(axis=1) & ~_weights_moved(window)
        events = bad.any(axis=1) | lost
        if not self._too_many(skipped):
            events &= ~skipped
        if events.any():
            return [self._from_steps(window, bad, lost, events, all_skipped=bool(skipped[events].all()))]
        if window.check is not None and _verdict_tensors(window.check, "nonfinite"):
            return [self._from_check(window.check, step=window.check_step)]
        return ()

    def _bad_tensors(self, window: Window) -> BoolArray:
        tracked = np.isfinite(window.column("nonfinite_count"))
        weights = tracked & ~np.isfinite(window.column("weight_norm"))
        return np.asarray((window.column("nonfinite_count") > 0) | weights, dtype=np.bool_)

    def _too_many(self, skipped: BoolArray) -> bool:
        longest = max((len(run) for run in "".join("x" if s else " " for s in skipped).split()), default=0)
        return bool(skipped.mean() >= self.skip_share and longest >= self.skip_streak) if skipped.size else False

    def _from_steps(
        self, window: Window, bad: BoolArray, lost: BoolArray, events: BoolArray, *, all_skipped: bool
    ) -> Finding:
        first = int(np.flatnonzero(events)[0])
        hit = [info for info, is_bad in zip(window.tensors, bad[first], strict=True) if is_bad]
        culprits = window.culprits or _broken_culprits(window.check)
        loss_words = "the loss is NaN or Inf" if lost[first] else "the loss is still finite"
        if all_skipped:
            layer, why = _deepest(hit), "the loss scaling keeps skipping steps, so the weights do not move"
        elif culprits:
            layer, why = culprits[0].layer, _culprit_words(culprits[0])
        elif hit and not lost[first]:
            layer = _deepest(hit)
            why = f"the fault lies just after {layer}: its gradient and those before it are hit, those after it are not"
        elif not np.isfinite(window.column("weight_norm")[first]).all() and first == 0:
            layer, why = hit[0].layer if hit else "loss", "the weights were already non-finite when watching began"
        else:
            layer, why = "loss", "it came up in the forward pass or in the loss itself"
        names = tuple(info.tensor for info in hit)
        where = f"; hit: {listed(names)}" if names else ""
        return Finding(
            finding="nonfinite",
            layer=layer,
            tensor=names[0] if names and not lost[first] else "",
            first_step=int(window.steps[first]),
            last_step=int(window.steps[np.flatnonzero(events)[-1]]),
            severity="error",
            value=float(bad[first].sum()),
            message=f"step {int(window.steps[first])}: {loss_words}; {why}{where}",
            advice=_nonfinite_advice(layer, culprits, all_skipped=all_skipped),
            tensors=names,
        )

    def _from_check(self, check: CheckResult, *, step: int) -> Finding:
        hit, culprits = _verdict_tensors(check, "nonfinite"), _broken_culprits(check)
        layer = culprits[0].layer if culprits else _deepest(hit)
        why = _culprit_words(culprits[0]) if culprits else f"the fault lies just after {layer}"
        names = tuple(info.tensor for info in hit)
        return Finding(
            finding="nonfinite",
            layer=layer,
            tensor=names[0],
            first_step=step,
            last_step=step,
            severity="error",
            value=float(len(names)),
            message=f"step {step}: the check of the probe gave NaN or Inf; {why}; hit: {listed(names)}",
            advice=_nonfinite_advice(layer, culprits, all_skipped=False),
            tensors=names,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected:
    """Trainable weights that the loss does not reach: their gradient is None."""

    def __call__(self, window: Window) -> Sequence[Finding]:
        """One finding per contiguous block of such weights, on the layer that cuts it off when the check found that."""
        cut = _cut_off(window)
        reasons = {row.tensor: row.reason for row in window.check.checks} if window.check else {}
        return [self._finding(window, block, cut=cut, reasons=reasons) for block in _blocks(cut)]

    def _finding(self, window: Window, block: range, *, cut: BoolArray, reasons: dict[str, str]) -> Finding:
        tensors = window.tensors[block.start : block.stop]
        names = tuple(info.tensor for info in tensors)
        reason = next((reasons[name] for name in names if reasons.get(name)), "")
        culprit = _cutting_culprit(window.check, tensors)
        layer = culprit.layer if culprit else tensors[-1].layer
        unused = "unused" in reason or (culprit is not None and "unused" in culprit.detail)
        if culprit:
            why = culprit.detail or f"{_title(culprit)} lets no gradient through"
        else:
            after = next((info.layer for info in window.tensors[block.stop :]), "")
            between = f"the cut lies between {layer} and {after}" if after else "their output does not reach the loss"
            why = reason or between
        return Finding(
            finding="disconnected",
            layer=layer,
            tensor=names[0] if len(names) == 1 else "",
            first_step=int(window.steps[0]) if window.steps.size else window.check_step,
            last_step=int(window.steps[-1]) if window.steps.size else window.check_step,
            severity="info" if unused else "warning",
            value=float(len(names)),
            message=f"the loss does not reach {listed(names)}: the gradient is None; {why}",
            advice=(
                "set trainable = False, or drop the unused part"
                if unused
                else "look for stop_gradient, argmax, round, a cast to int or NumPy code on the way to the loss; "
                "if it is meant, set trainable = False"
            ),
            tensors=names,
        )


def _verdict_tensors(check: CheckResult, verdict: str) -> tuple[TensorInfo, ...]:
    return tuple(info for info, row in zip(check.tensors, check.checks, strict=True) if row.verdict == verdict)


def _right_downstream(check: CheckResult, wrong: tuple[TensorInfo, ...]) -> tuple[TensorInfo, ...]:
    deepest = max(info.depth for info in wrong)
    return tuple(info for info in _verdict_tensors(check, "ok") if info.role == "weight" and info.depth > deepest)


def _title(culprit: Culprit) -> str:
    return f"{culprit.layer} ({culprit.layer_class})" if culprit.layer_class else culprit.layer


def _factor_words(factor: float) -> str:
    if math.isnan(factor):
        return "disagrees with its forward"
    if abs(factor) < 1e-6:  # nothing is left of the slope, to float32 rounding
        return "gives nothing where the slope is not zero"
    if abs(factor - 1.0) < 1e-3:  # rounds to 1.00
        return "has the right size along the true gradient but points elsewhere"
    return f"gives {factor:.2f} × the true slope" if 0.1 <= abs(factor) < 100 else f"gives {factor:.1e} × the true slope"


def _error_words(culprit: Culprit) -> str:
    return "" if math.isnan(culprit.error) else f" (error {culprit.error:.1e}, bar {culprit.bar:.0e})"


def _mismatch_advice(culprit: Culprit) -> str:
    if culprit.layer in PSEUDO_LAYERS:
        return "compare the custom gradient of the loss with its value: compute_gradient_error(loss_of_predictions, [y_pred])"
    getter = "".join(f".get_layer({name!r})" for name in culprit.layer.split("/")).replace("'", '"')
    advice = (
        f"compare {culprit.layer_class or culprit.layer}'s custom gradient with its call; "
        f"check_layer(model{getter}, x) shows it alone"
    )
    if culprit.factor < 0:
        advice += f'; if it reverses gradients on purpose, name it: surrogates=("{culprit.layer}",)'
    return advice


def _weights_moved(window: Window) -> BoolArray:
    """Steps whose update changed, or broke, any weight."""
    ratio = window.column("update_ratio")
    tracked = np.isfinite(window.column("nonfinite_count"))
    return np.asarray((tracked & (ratio != 0.0)).any(axis=1), dtype=np.bool_)


def _broken_culprits(check: CheckResult | None) -> tuple[Culprit, ...]:
    """The check's culprits for non-finite values; a wrong but finite backward elsewhere is another story."""
    if check is None or not _verdict_tensors(check, "nonfinite"):
        return ()
    return tuple(culprit for culprit in check.culprits if culprit.kind != "cut" and not math.isfinite(culprit.error))


def _deepest(tensors: Sequence[TensorInfo]) -> str:
    return max(tensors, key=lambda info: info.depth).layer


def _culprit_words(culprit: Culprit) -> str:
    if culprit.detail:
        return f"{_title(culprit)}: {culprit.detail}"
    if culprit.layer in PSEUDO_LAYERS:
        return f"NaN or Inf in the {culprit.layer.replace('_', ' ')}"
    made = "output" if culprit.kind == "forward" else "gradient"
    return f"{_title(culprit)} turns finite values into a non-finite {made}"


def _nonfinite_advice(layer: str, culprits: tuple[Culprit, ...], *, all_skipped: bool) -> str:
    if all_skipped:
        return "let this part run in float32, or lower the learning rate: some gradient overflows float16 at any scale"
    if layer in ("data", "labels", "sample_weight"):
        return f"clean the {layer.replace('_', ' ')}: drop or replace the rows with NaN or Inf"
    if not culprits:
        return (
            "look for log, sqrt, division or a power at 0 without an epsilon near there; "
            "otherwise lower the learning rate or set clipnorm"
        )
    if culprits[0].kind == "forward" and layer != "loss":
        return f"keep the values that enter {layer} in range: scale the input or weights, lower the learning rate"
    return (
        f"add an epsilon to log, sqrt, division or powers in {layer}, "
        "and make tf.where-style guards safe in both branches"
    )


def _cut_off(window: Window) -> BoolArray:
    """Weights without a gradient at every step, or called disconnected by the check, shape ``[V]``."""
    never = ~window.connected.any(axis=0) if window.steps.size else np.zeros(len(window.tensors), dtype=np.bool_)
    checked = {info.tensor for info in _verdict_tensors(window.check, "disconnected")} if window.check else set()
    # One connected step outweighs an older check: the part may have been switched on since.
    by_check = np.array([info.tensor in checked for info in window.tensors], dtype=np.bool_) & ~connected(window)
    return np.asarray(never | by_check, dtype=np.bool_)


def _blocks(mask: BoolArray) -> list[range]:
    """Runs of True as index ranges."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [range(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _cutting_culprit(check: CheckResult | None, tensors: tuple[TensorInfo, ...]) -> Culprit | None:
    """The culprit that cuts this block: the one that names one of its tensors, else the only cut there is."""
    cuts = [culprit for culprit in check.culprits if culprit.kind == "cut"] if check else []
    names = {info.tensor for info in tensors} | {info.layer for info in tensors}
    named = [culprit for culprit in cuts if names & {*culprit.parts, culprit.layer}]
    return named[0] if named else cuts[0] if len(cuts) == 1 else None
