"""Slopes of a loss along lines, by central differences with error bars. Pure NumPy.

The caller brings a :class:`Problem`: a loss around a base point, known only through its values along directions. Every
tensor has two directions, one random and one along its gradient, so a test needs no array larger than a handful of
coefficients. A test moves any set of tensors at once and compares one central difference with the sum of the analytic
slopes; two loss evaluations judge a whole model, whatever its size:

    numeric = (L(+h) − L(−h)) / 2h      analytic = Σ_j c_j · ⟨g_j, d_j⟩      gap = numeric − analytic
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from keras_gradwatch.records import Float64Array

EPSILON = float(np.finfo(np.float64).eps)

Members = npt.NDArray[np.bool_]
Part = tuple[int, int, int]
"""(tensor, start, stop): a stretch of one tensor's entries, flattened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """Numbers behind the verdicts.

    Attributes:
        step: relative difference step. At 1e-7 rounding of a float64 loss (1e-16) moves a slope by about 1e-9 of the
            loss, while steps of 1e-5 and more cross kinks of ReLU networks (measured: our ResNet of 61 tensors).
        noise: rounding of one loss value in units of ``eps · |loss|`` that is assumed until it is measured; 8 covers
            the networks measured (1…4 seen).
        floor: part of the bar proportional to the slope itself: kinks crossed and truncation within the step (at most
            1e-7 seen in smooth and ReLU networks, one-sided differences included).
        quick: believe a one-sided difference when it agrees (one loss instead of two, error 1e-8…1e-7 instead of
            1e-10…1e-9); what disagrees is judged by central differences all the same.
        resolution: relative error that a certified tensor must be able to show (1 %, our choice: design section 6).
        sharp: relative error up to which long steps for several weak tensors at once are good enough.
        zero: a gradient whose effect over the tensor's whole size is below this share of the largest one is zero;
            mathematically zero gradients (bias before BatchNorm, key bias of attention) come out at 1e-16…1e-17.
        kink: a jump between left and right slope is a kink when above this share of the gap (a tie or a hinge gives
            0.5…2, a smooth loss 1e-7 of its curvature).
        jitter: relative sizes of the moves off a kink, tried in turn. At 1e-4 with a step of 1e-8 one in 10^4 of the
            units that sat on their kink is met again.
        confirmations: how many wrong tensors are confirmed one by one, nearest the loss first, before the rest is
            confirmed together.
        samples: nearby points at which the slopes that a kink joins are sampled.
        entries: single entries looked at in each of the kinked tensors nearest the loss, at most as many tensors.
    """

    step: float = 1e-7
    noise: float = 8.0
    floor: float = 2e-7
    quick: bool = False
    resolution: float = 1e-2
    sharp: float = 1e-6
    zero: float = 1e-12
    kink: float = 2e-2
    jitter: tuple[float, ...] = (1e-4, 1e-3)
    confirmations: int = 12
    samples: int = 6
    entries: int = 3


class Line(Protocol):
    """Directions through a point."""

    slopes: Float64Array
    """Analytic slopes, shape ``[2, T]``: along the random direction, along the gradient (its norm)."""

    def losses(self, coefficients: Float64Array) -> Float64Array:
        """Losses at ``base + c[0] · random + c[1] · aligned``; coefficients ``[K, 2, T]``, result ``[K]``."""

    def entry(self, j: int, index: int) -> float:
        """The random direction's value at one flat entry of tensor ``j``."""


class Problem(Protocol):
    """A scalar loss around a base point, as a function of ``T`` tensors."""

    loss: float
    scales: Float64Array
    """rms of each tensor's entries, never 0 (a floor where a tensor is all zeros)."""
    norms: Float64Array
    """Norm of each gradient; 0 where it is None."""
    sizes: Float64Array
    """Number of elements."""

    def line(self, seed: int, part: Part | None = None) -> Line:
        """Fresh directions; the random one of ``part``'s tensor is zero outside of that stretch of entries."""

    def jittered(self, size: float, seed: int) -> Problem:
        """The same loss at a nearby point: every tensor moved by ``size`` of its scale, with the gradients there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Numeric minus analytic slope of one move, and what it may be off by.

    Attributes:
        gap: numeric − analytic.
        bar: what rounding, kinks crossed and truncation may add up to.
        numeric: the central difference.
        jump: right minus left slope.
        shares: analytic slope contributed by each tensor, shape ``[T]``.
    """

    gap: float
    bar: float
    numeric: float
    jump: float
    shares: Float64Array

    @property
    def finite(self) -> bool:
        """False when a loss beside the base point is NaN or Inf."""
        return bool(np.isfinite(self.gap))

    @property
    def agrees(self) -> bool:
        """The gap is within its bar."""
        return bool(abs(self.gap) <= self.bar)

    @property
    def total(self) -> float:
        """Sum of the sizes of all shares."""
        return float(np.abs(self.shares).sum())

    def smooth(self, kink: float) -> bool:
        """No jump between left and right slope that could explain the gap."""
        return bool(abs(self.jump) <= max(4 * self.bar, kink * abs(self.gap)))

    def inside(self) -> bool:
        """The analytic slope lies between left and right slope."""
        analytic = float(self.shares.sum())
        left, right = self.numeric - self.jump / 2, self.numeric + self.jump / 2
        slack = 4 * self.bar + 1e-2 * abs(self.jump)
        return min(left, right) - slack <= analytic <= max(left, right) + slack

    def without(self, part: Gap) -> Gap:
        """What is left of a move when a part of it is taken out: slopes are linear, bars add up."""
        return Gap(
            gap=self.gap - part.gap, bar=self.bar + part.bar, numeric=self.numeric - part.numeric,
            jump=self.jump - part.jump, shares=self.shares - part.shares,
        )  # fmt: skip


@dataclass(slots=True)
class Ledger:
    """What a check has spent, and what it has learnt about the loss.

    Attributes:
        evaluations: losses evaluated.
        noise: measured standard deviation of one loss value, 0 before it is measured.
    """

    evaluations: int = 0
    noise: float = 0.0


@dataclass(slots=True)
class Bench:
    """One base point with one set of directions, and the tests made there."""

    problem: Problem
    line: Line
    settings: CheckSettings
    ledger: Ledger
    seed: int
    slack: float = 1.0
    tau: float = field(init=False)

    def __post_init__(self) -> None:
        swing = self.problem.scales * self.problem.norms
        known = swing[(swing > 0) & np.isfinite(swing)]
        self.tau = float(np.median(known)) if len(known) else 1.0

    def moves(self, members: Members, *, full: bool = False) -> Float64Array:
        """Unit moves ``[2, T]`` of a set of tensors: comparable shares of the slope, capped by each tensor's size.

        With equal shares no tensor drowns; a random factor on each keeps two faults from cancelling; the random
        direction is turned so that its slope adds to the aligned one. ``full`` moves every tensor by its own size.
        """
        problem = self.problem
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            wanted = np.where(problem.norms > 0, self.tau / problem.norms, np.inf)
        mix = np.random.default_rng([abs(self.seed), 3]).uniform(0.6, 1.4, (2, len(wanted)))
        wanted = np.full_like(mix, np.inf) if full else mix * wanted
        signs = np.where(self.line.slopes[0] < 0, -1.0, 1.0)
        random = np.minimum(problem.scales, wanted[0]) * signs
        aligned = np.minimum(problem.scales * np.sqrt(problem.sizes), wanted[1])
        return np.where(members, np.stack([random, aligned]), 0.0)

    def apart(self, index: int) -> list[Float64Array]:
        """The two moves of one tensor, each on its own: random and aligned."""
        both = self.moves(single(len(self.problem.sizes), index), full=True)
        return [both * [[1.0], [0.0]], both * [[0.0], [1.0]]]

    def measure_noise(self, move: Float64Array) -> None:
        """Noise of one loss value from second differences over tiny equal steps, which leave no slope behind.

        On one side of the base only, where a kink at the base cannot be crossed. For independent noise of variance
        s², a second difference e₁ − 2e₂ + e₃ has variance 6 s² (Moré and Wild, 2011, "Estimating computational
        noise", section 2).
        """
        steps = np.arange(1, 10)[:, None, None] * (self.settings.step / 64)
        second = np.diff(self._losses(steps * move), n=2)
        self.ledger.noise = float(np.sqrt(np.mean(second**2) / 6)) if np.isfinite(second).all() else 0.0

    def ahead(self, move: Float64Array, step: float) -> Gap:
        """A one-sided difference: one loss, compared with that of the base point."""
        plus = float(self._losses(step * move[None])[0])
        base = self.problem.loss
        return self._gap(np.array([plus, 2 * base - plus]), base, step, (move * self.line.slopes).sum(axis=0))

    def test(self, moves: Sequence[Float64Array], steps: Sequence[float], *, jumps: bool = False) -> list[Gap]:
        """Central differences along several moves in one go; with several steps, the steadiest of each move."""
        if not moves:
            return []
        points = [sign * step * move for step in steps for move in moves for sign in (1.0, -1.0)]
        points += [np.zeros_like(moves[0])] if jumps else []
        losses = self._losses(np.stack(points))
        base = float(losses[-1]) if jumps else self.problem.loss
        pairs = losses[: 2 * len(steps) * len(moves)].reshape(len(steps), len(moves), 2)
        shares = [(move * self.line.slopes).sum(axis=0) for move in moves]
        found = [
            [self._gap(pairs[s, m], base, step, shares[m]) for s, step in enumerate(steps)] for m in range(len(moves))
        ]
        return [_steadiest(results) for results in found]

    def _losses(self, points: Float64Array) -> Float64Array:
        self.ledger.evaluations += len(points)
        return self.line.losses(points)

    def _gap(self, pair: Float64Array, base: float, step: float, shares: Float64Array) -> Gap:
        plus, minus = float(pair[0]), float(pair[1])
        numeric = (plus - minus) / (2 * step)
        rounding = self.settings.noise * EPSILON * max(abs(plus), abs(minus), abs(base))
        noise = max(rounding, 6 * self.ledger.noise) / step
        return Gap(
            gap=numeric - float(shares.sum()),
            bar=noise + self.slack * self.settings.floor * float(np.abs(shares).sum()),
            numeric=numeric, jump=(plus - 2 * base + minus) / step, shares=shares,
        )  # fmt: skip


def single(count: int, index: int) -> Members:
    """A set of one tensor."""
    alone = np.zeros(count, bool)
    alone[index] = True
    return alone


def _steadiest(results: Sequence[Gap]) -> Gap:
    """The result with the smallest bar once each is widened by its change from the next shorter step.

    Noise falls with the step, truncation and kinks grow with it; a slope that no longer changes has left both behind.
    """
    if len(results) == 1:
        return results[0]
    widened = [results[0]] + [
        replace(result, bar=max(result.bar, 2 * abs(result.numeric - shorter.numeric)))
        for shorter, result in pairwise(results)
    ]
    best = min(widened, key=lambda result: result.bar if result.finite else np.inf)
    # Curvature makes left and right slope differ too, in proportion to the step; at a kink they differ at every step.
    return replace(best, jump=min((result.jump for result in results), key=abs))
