"""Is the gradient the slope of the loss? Slopes along lines, error bars, kinks, and which tensors are wrong. Pure NumPy.

The caller brings a :class:`Problem`: a loss around a base point, known only through its values along directions. Every
tensor has two directions, one random and one along its gradient, so a test needs no array larger than a handful of
coefficients. A test moves any set of tensors at once and compares one central difference with the sum of the analytic
slopes; two loss evaluations judge a whole model, whatever its size:

    numeric = (L(+h) − L(−h)) / 2h      analytic = Σ_j c_j · ⟨g_j, d_j⟩      gap = numeric − analytic

Tensors are scaled so that each contributes a comparable share of the slope (none drowns), never beyond its own size.
The gap is judged against an error bar; if it is larger, halves are tested until the wrong tensors are found; those are
confirmed with fresh directions, and away from kinks, before anything is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from keras_gradwatch.records import Float64Array

_EPSILON = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """Numbers behind the verdicts.

    Attributes:
        step: relative difference step. At 1e-7 rounding of a float64 loss (1e-16) moves a slope by about 1e-9 of the
            loss, while steps of 1e-5 and more cross kinks of ReLU networks (measured: our ResNet of 61 tensors).
        noise: rounding of one loss value in units of ``eps · |loss|``; 8 covers the networks measured (1…4 seen).
        floor: part of the bar proportional to the slope itself: kinks crossed and truncation within the step.
        resolution: relative error that a certified tensor must be able to show (1 %, our choice: design section 6).
        zero: a gradient whose effect over the tensor's whole size is below this share of the largest one is zero;
            mathematically zero gradients (bias before BatchNorm, key bias of attention) come out at 1e-16…1e-17.
        kink: a jump between left and right slope is a kink when above this share of the gap (a tie or a hinge gives
            0.5…2, a smooth loss 1e-7 of its curvature).
        jitter: relative size of the move off a kink (1e-6…1e-5 cleared all kinks met).
        confirmations: how many weak or wrong tensors are looked at one by one before the rest is judged together.
    """

    step: float = 1e-7
    noise: float = 8.0
    floor: float = 1e-6
    resolution: float = 1e-2
    zero: float = 1e-12
    kink: float = 2e-2
    jitter: float = 1e-5
    confirmations: int = 24


class Line(Protocol):
    """Directions through a point."""

    slopes: Float64Array
    """Analytic slopes, shape ``[2, T]``: along the random direction, along the gradient (its norm)."""

    def losses(self, coefficients: Float64Array) -> Float64Array:
        """Losses at ``base + c[0] · random + c[1] · aligned``; coefficients ``[K, 2, T]``, result ``[K]``."""


class Problem(Protocol):
    """A scalar loss around a base point, as a function of ``T`` tensors."""

    loss: float
    scales: Float64Array
    """rms of each tensor's entries, never 0 (a floor where a tensor is all zeros)."""
    norms: Float64Array
    """Norm of each gradient; 0 where it is None."""
    sizes: Float64Array
    """Number of elements."""

    def line(self, seed: int) -> Line:
        """Fresh directions."""

    def jittered(self, size: float, seed: int) -> Problem:
        """The same loss at a nearby point: every tensor moved by ``size`` of its scale, with the gradients there."""


@dataclass(slots=True)
class Outcome:
    """Verdict per tensor of one :func:`check_problem` call (arrays of length ``T``) and what it cost."""

    verdicts: list[str]
    errors: Float64Array
    bars: Float64Array
    factors: Float64Array
    reasons: list[str]
    evaluations: int = 0
    awake: bool = True


@dataclass(frozen=True, slots=True)
class _Gap:
    """Result of one test of a set of tensors."""

    gap: float
    bar: float
    jump: float
    numeric: float
    shares: Float64Array

    @property
    def agrees(self) -> bool:
        return bool(abs(self.gap) <= self.bar)

    def smooth(self, kink: float) -> bool:
        """No jump between left and right slope that could explain the gap."""
        return bool(abs(self.jump) <= max(4 * self.bar, kink * abs(self.gap)))


@dataclass(slots=True)
class _Bench:
    """One base point with one set of directions, and the tests made there."""

    problem: Problem
    line: Line
    settings: CheckSettings
    spent: Callable[[int], None]
    tau: float = field(init=False)
    signs: Float64Array = field(init=False)

    def __post_init__(self) -> None:
        swing = self.problem.scales * self.problem.norms
        known = swing[(swing > 0) & np.isfinite(swing)]
        self.tau = float(np.median(known)) if len(known) else 1.0
        # The random direction is turned so that its slope adds to the aligned one: no tensor can hide by cancelling.
        self.signs = np.where(self.line.slopes[0] < 0, -1.0, 1.0)

    def coefficients(self, members: npt.NDArray[np.bool_], *, full: bool = False) -> Float64Array:
        """Unit moves ``[2, T]`` of a set of tensors: equal shares of the slope, capped by each tensor's size."""
        problem = self.problem
        limit = np.inf if full else self.tau
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            wanted = np.where(problem.norms > 0, limit / problem.norms, np.inf)
        random = np.minimum(problem.scales, wanted) * self.signs
        aligned = np.minimum(problem.scales * np.sqrt(problem.sizes), wanted)
        return np.where(members, np.stack([random, aligned]), 0.0)

    def test(
        self, moves: Sequence[Float64Array], step: float, *, slack: float = 1.0, jumps: bool = False
    ) -> list[_Gap]:
        """Central differences along several moves in one go; ``slack`` widens the slope-proportional part of the bar."""
        if not moves:
            return []
        points = np.concatenate([np.stack([step * m, -step * m]) for m in moves])
        if jumps:
            points = np.concatenate([points, np.zeros((1, *moves[0].shape))])
        losses = self.line.losses(points)
        self.spent(len(losses))
        base = float(losses[-1]) if jumps else self.problem.loss
        found = []
        for k, move in enumerate(moves):
            plus, minus = float(losses[2 * k]), float(losses[2 * k + 1])
            shares = np.where(move != 0, move * np.where(move != 0, self.line.slopes, 0.0), 0.0).sum(axis=0)
            numeric = (plus - minus) / (2 * step)
            noise = self.settings.noise * _EPSILON * max(abs(plus), abs(minus), abs(base)) / step
            bar = noise + slack * self.settings.floor * float(np.abs(shares).sum())
            jump = (plus - 2 * base + minus) / step
            found.append(_Gap(numeric - float(shares.sum()), bar, jump, numeric, shares))
        return found


def check_problem(
    problem: Problem, seed: int, settings: CheckSettings | None = None, *, candidates: npt.NDArray[np.bool_] | None = None
) -> Outcome:
    """Judge every candidate tensor of a problem.

    Args:
        problem: the loss around its base point; its loss and gradients must be finite.
        seed: of the directions.
        settings: numbers behind the verdicts.
        candidates: which tensors to judge, shape ``[T]``; the others are not moved and get the verdict ``""``.

    Returns:
        The verdicts ``ok``, ``zero``, ``kink``, ``mismatch`` or ``inconclusive`` per tensor, with errors and bars
        relative to the gradient's norm.
    """
    settings = settings or CheckSettings()
    count = len(problem.sizes)
    members = np.ones(count, bool) if candidates is None else candidates.copy()
    members &= problem.sizes > 0
    outcome = Outcome(
        [""] * count, np.full(count, np.nan), np.full(count, np.nan), np.full(count, np.nan), [""] * count
    )
    if members.any():
        _Judge(problem, seed, settings, outcome).judge(members)
    return outcome


class _Judge:
    """The course of one check: group, split, confirm, and weak tensors with longer steps."""

    def __init__(self, problem: Problem, seed: int, settings: CheckSettings, outcome: Outcome) -> None:
        self.problem, self.seed, self.settings, self.outcome = problem, seed, settings, outcome
        effect = problem.norms * problem.scales * np.sqrt(problem.sizes)
        largest = max(float(effect[np.isfinite(effect)].max(initial=0.0)), abs(problem.loss) * _EPSILON)
        self.zero = effect <= settings.zero * largest

    def spend(self, evaluations: int) -> None:
        self.outcome.evaluations += evaluations

    def bench(self, problem: Problem, turn: int) -> _Bench:
        return _Bench(problem, problem.line(self.seed * 1009 + turn), self.settings, self.spend)

    def judge(self, members: npt.NDArray[np.bool_]) -> None:
        bench = self.bench(self.problem, 0)
        wrong = self.sift(bench, members, self.settings.step)
        kinked = self.confirm(wrong)
        if kinked.any():
            self.leave_kinks(kinked)
        weak = members & np.array([v == "weak" for v in self.outcome.verdicts])
        if weak.any():
            self.strengthen(bench, weak)

    def sift(self, bench: _Bench, members: npt.NDArray[np.bool_], step: float) -> npt.NDArray[np.bool_]:
        """Pass what agrees, halve what does not; returns the tensors that disagree when moved alone."""
        wrong = np.zeros_like(members)
        groups = [members]
        first = True
        while groups:
            results = bench.test([bench.coefficients(g) for g in groups], step)
            if first and not results[0].agrees:
                # Rounding larger than assumed shrinks with a longer step; a wrong gradient and a kink do not.
                longer = bench.test([bench.coefficients(members)], 16 * step, slack=8.0)[0]
                if longer.agrees and self.accept(bench, members, longer):
                    return wrong
            first = False
            waiting: list[npt.NDArray[np.bool_]] = []
            for group, result in zip(groups, results, strict=True):
                if result.agrees:
                    self.accept(bench, group, result)
                elif group.sum() == 1:
                    wrong |= group
                    self.note(group, result)
                else:
                    waiting.extend(_halves(group))
            groups = waiting
        return wrong

    def accept(self, bench: _Bench, group: npt.NDArray[np.bool_], result: _Gap) -> bool:
        """Write ``ok``, ``zero`` or ``weak`` for a group that agrees; True when all are certified."""
        total = max(float(np.abs(result.shares).sum()), 1e-300)
        certified = True
        for j in np.flatnonzero(group):
            share = abs(float(result.shares[j]))
            bar = result.bar / share if share > 0 else np.inf
            seen = abs(result.gap) + self.settings.resolution * share > 2 * result.bar
            if self.zero[j]:
                # The tensor moved by its own size and the loss did not follow beyond the bar.
                self.set(j, "zero", abs(result.gap) / total if total > 1e-300 else 0.0, bar, "")
            elif self.settings.resolution * share >= 2 * result.bar:
                # Negative control: one per cent planted in this tensor alone must be seen by this very comparison.
                self.outcome.awake &= seen
                self.set(j, "ok", abs(result.gap) / total, bar, "")
            else:
                certified = False
                self.set(j, "weak", abs(result.gap) / total, bar, "")
        return certified

    def note(self, group: npt.NDArray[np.bool_], result: _Gap) -> None:
        j = int(np.flatnonzero(group)[0])
        share = max(abs(float(result.shares[j])), abs(result.numeric), 1e-300)
        self.set(j, "mismatch", abs(result.gap) / share, result.bar / share, "")

    def set(self, j: int, verdict: str, error: float, bar: float, reason: str) -> None:
        self.outcome.verdicts[j], self.outcome.reasons[j] = verdict, reason
        self.outcome.errors[j], self.outcome.bars[j] = error, bar

    def confirm(self, wrong: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Look at suspects again with fresh directions and a shorter step; returns those that sit on a kink."""
        kinked = np.zeros_like(wrong)
        if not wrong.any():
            return kinked
        step = self.settings.step / 4
        fresh = self.bench(self.problem, 1)
        ordered = np.flatnonzero(wrong)[::-1]  # nearest the loss first
        singles, rest = ordered[: self.settings.confirmations], ordered[self.settings.confirmations :]
        moves = []
        for j in singles:
            alone = np.zeros_like(wrong)
            alone[j] = True
            both = fresh.coefficients(alone, full=True)
            moves += [both * [[1.0], [0.0]], both * [[0.0], [1.0]]]
        results = fresh.test(moves, step, jumps=True)
        for k, j in enumerate(singles):
            random, aligned = results[2 * k], results[2 * k + 1]
            if random.agrees and aligned.agrees:
                self.set(j, "weak", 0.0, np.inf, "")  # did not repeat: judged again on its own with longer steps
            elif not random.smooth(self.settings.kink) or not aligned.smooth(self.settings.kink):
                kinked[j] = True
            else:
                self.describe(int(j), random, aligned)
        if len(rest):
            group = np.zeros_like(wrong)
            group[rest] = True
            result = fresh.test([fresh.coefficients(group)], step, jumps=True)[0]
            if not result.smooth(self.settings.kink):
                kinked |= group
        return kinked

    def describe(self, j: int, random: _Gap, aligned: _Gap) -> None:
        """Error, bar and factor of one confirmed wrong tensor."""
        norm = abs(float(aligned.shares[j]))
        swing = self.problem.scales[j] * self.problem.norms[j]
        reference = max(norm, abs(aligned.numeric), abs(random.numeric), 1e-300)
        error = max(abs(aligned.gap) / reference, min(abs(random.gap) / max(swing, abs(random.numeric), 1e-300), 1e300))
        self.set(j, "mismatch", error, max(aligned.bar, random.bar) / reference, "")
        if norm == 0.0:
            self.outcome.factors[j] = 0.0
        elif abs(aligned.numeric) > 4 * aligned.bar:
            # One number describes the fault only if it also holds across the gradient, along the random direction.
            factor = float(aligned.shares[j]) / aligned.numeric
            left_over = abs(factor * random.numeric - float(random.shares[j]))
            if left_over <= 1e-3 * abs(float(random.shares[j])) + 4 * random.bar:
                self.outcome.factors[j] = factor

    def leave_kinks(self, kinked: npt.NDArray[np.bool_]) -> None:
        """Judge tensors on a kink at a jittered point: right there means a kink here, wrong there means wrong."""
        for attempt in range(2):
            problem = self.problem.jittered(self.settings.jitter * 3.0**-attempt, self.seed + 7 + attempt)
            if not np.isfinite(problem.loss) or not np.isfinite(problem.norms).all():
                break
            aside = Outcome(
                list(self.outcome.verdicts), self.outcome.errors.copy(), self.outcome.bars.copy(),
                self.outcome.factors.copy(), list(self.outcome.reasons),
            )  # fmt: skip
            judge = _Judge(problem, self.seed + attempt, self.settings, aside)
            bench = judge.bench(problem, 2 + attempt)
            wrong = judge.sift(bench, kinked.copy(), self.settings.step / 8)
            again = judge.confirm(wrong)
            self.outcome.evaluations += aside.evaluations
            still = np.zeros_like(kinked)
            for j in np.flatnonzero(kinked):
                verdict = aside.verdicts[j]
                if again[j]:
                    still[j] = True
                    continue
                if verdict == "mismatch":
                    self.set(j, "mismatch", float(aside.errors[j]), float(aside.bars[j]), "")
                    self.outcome.factors[j] = aside.factors[j]
                else:
                    reason = "left and right slope differ here; right at nearby points"
                    self.set(j, "kink", float(aside.errors[j]), float(aside.bars[j]), reason)
            kinked = still
            if not kinked.any():
                return
        for j in np.flatnonzero(kinked):
            self.set(j, "inconclusive", np.nan, np.inf, "kinks at every point tried: slopes jump within the step")

    def strengthen(self, bench: _Bench, weak: npt.NDArray[np.bool_]) -> None:
        """Judge tensors that hardly move the loss: together, then one by one, with longer and longer steps."""
        steps = [self.settings.step * 16.0**k for k in range(1, 5)]
        for group in [weak, *(_single(weak, j) for j in np.flatnonzero(weak)[: self.settings.confirmations])]:
            remaining = group & np.array([v == "weak" for v in self.outcome.verdicts])
            if not remaining.any():
                continue
            move = bench.coefficients(remaining, full=remaining.sum() == 1)
            results = [bench.test([move], step)[0] for step in steps]
            index, bar = _steadiest(results)
            best = results[index]
            result = _Gap(best.gap, bar, best.jump, best.numeric, best.shares)
            if result.agrees:
                self.accept(bench, remaining, result)
            elif remaining.sum() == 1 and abs(result.gap) > 5 * bar and self.repeats(remaining, steps, index):
                self.note(remaining, result)
        for j in np.flatnonzero(weak):
            if self.outcome.verdicts[j] == "weak":
                reason = "its part of the loss is below the rounding noise of float64 at every step tried"
                self.set(j, "inconclusive", np.nan, float(self.outcome.bars[j]), reason)

    def repeats(self, member: npt.NDArray[np.bool_], steps: Sequence[float], index: int) -> bool:
        """Does a weak tensor's disagreement come back with fresh directions, at a smooth point?"""
        fresh = self.bench(self.problem, 11)
        move = fresh.coefficients(member, full=True)
        near = [fresh.test([move], steps[k], jumps=True)[0] for k in sorted({max(index - 1, 0), index})]
        return all(not r.agrees and abs(r.gap) > 5 * r.bar and r.smooth(self.settings.kink) for r in near)


def _steadiest(results: Sequence[_Gap]) -> tuple[int, float]:
    """Index and bar of the result whose bar, widened by the change from the next shorter step, is smallest."""
    bars = [
        max(result.bar, 2 * abs(result.numeric - shorter.numeric) if shorter else 0.0)
        for result, shorter in zip(results, [None, *results[:-1]], strict=True)
    ]
    best = int(np.argmin(bars))
    return best, bars[best]


def _halves(group: npt.NDArray[np.bool_]) -> Iterable[npt.NDArray[np.bool_]]:
    indices = np.flatnonzero(group)
    for part in (indices[: len(indices) // 2], indices[len(indices) // 2 :]):
        half = np.zeros_like(group)
        half[part] = True
        yield half


def _single(group: npt.NDArray[np.bool_], index: int) -> npt.NDArray[np.bool_]:
    alone = np.zeros_like(group)
    alone[index] = True
    return alone
