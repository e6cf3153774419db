"""Is the gradient the slope of the loss, and if not, in which tensors? Pure NumPy.

One comparison judges all tensors at once (:mod:`keras_gradwatch.slopes`). If it disagrees, halves are tested until the
wrong tensors are found; those are confirmed with fresh directions, here and at nearby points, before anything is said.
Tensors too weak for the common comparison, and those whose gradient is zero, are judged apart with longer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from keras_gradwatch.records import Float64Array
from keras_gradwatch.slopes import (
    EPSILON,
    Bench,
    CheckSettings,
    Gap,
    Ledger,
    Line,
    Members,
    Part,
    Problem,
    single,
)

__all__ = ["CheckSettings", "Line", "Outcome", "Part", "Problem", "blank_outcome", "check_problem"]

_TINY = 1e-300
_POINTWISE = "wrong at this very point: right nearby, yet no kink allows it here"
_OUTSIDE = "on a kink, and not between left and right slope; right nearby"
_KINK = "left and right slope differ here; right at nearby points"


@dataclass(slots=True)
class Outcome:
    """Verdict per tensor of one :func:`check_problem` call (arrays of length ``T``) and what it cost.

    Attributes:
        verdicts: ``ok``, ``zero``, ``kink``, ``mismatch``, ``inconclusive``, or ``""`` where nothing was judged.
        errors, bars: of the comparison, relative to the tensor's own part in it (for ``zero``: to a typical part).
        factors: analytic / numeric slope where one number describes the fault, else NaN.
        reasons: why a verdict is not plainly ``ok``.
        evaluations: losses evaluated.
        awake: one per cent planted in any certified tensor would have been seen by the comparison that certified it.
    """

    verdicts: list[str]
    errors: Float64Array
    bars: Float64Array
    factors: Float64Array
    reasons: list[str]
    evaluations: int = 0
    awake: bool = True


def blank_outcome(count: int) -> Outcome:
    """An outcome in which nothing was judged."""
    errors, bars, factors = (np.full(count, np.nan) for _ in range(3))
    return Outcome([""] * count, errors, bars, factors, [""] * count)


def check_problem(
    problem: Problem, seed: int, settings: CheckSettings | None = None, *, candidates: Members | None = None
) -> Outcome:
    """Judge every candidate tensor of a problem.

    Args:
        problem: the loss around its base point; its loss and gradients must be finite.
        seed: of the directions.
        settings: numbers behind the verdicts.
        candidates: which tensors to judge, shape ``[T]``; the others are not moved and get the verdict ``""``.

    Returns:
        The verdicts, with errors and bars relative to the gradient's part in the comparison.
    """
    settings = settings or CheckSettings()
    count = len(problem.sizes)
    members = np.ones(count, bool) if candidates is None else candidates.copy()
    members &= problem.sizes > 0
    outcome = blank_outcome(count)
    if members.any():
        judge = _Judge(problem, seed, settings, outcome)
        judge.judge(members)
        outcome.evaluations = judge.ledger.evaluations
    return outcome


class _Judge:
    """The course of one check: all at once, then zero and weak tensors, halving and confirming what disagrees."""

    def __init__(self, problem: Problem, seed: int, settings: CheckSettings, outcome: Outcome) -> None:
        self.problem, self.seed, self.settings, self.outcome = problem, seed, settings, outcome
        self.ledger = Ledger()
        effect = problem.norms * problem.scales * np.sqrt(problem.sizes)
        largest = max(float(effect[np.isfinite(effect)].max(initial=0.0)), abs(problem.loss) * EPSILON)
        self.zero = effect <= settings.zero * largest
        self.count = len(problem.sizes)

    def bench(self, problem: Problem, turn: int, *, slack: float = 1.0, part: Part | None = None) -> Bench:
        seed = self.line_seed(turn)
        return Bench(problem, problem.line(seed, part), self.settings, self.ledger, seed, slack)

    def line_seed(self, turn: int) -> int:
        return self.seed * 1009 + turn

    def judge(self, members: Members) -> None:
        bench, step = self.bench(self.problem, 0), self.settings.step
        usual, zeros = members & ~self.zero, members & self.zero
        longer = 2.0**8 * step  # sees more below the noise; nothing of a zero gradient changes along the way
        if usual.any() and not (self.quickly(bench, usual, step / 10) or self.together_right(bench, usual)):
            self.confirm(self.sift(bench, usual, (step,)), (step / 4,))
        if zeros.any() and not self.quickly(bench, zeros, longer, full=True):
            several = (step, longer, 2.0**8 * longer)
            suspects = self.sift(bench, zeros, (longer,), full=True)
            if suspects.any():
                self.confirm(self.sift(bench, suspects, several, full=True), several)
        self.strengthen(bench)

    def quickly(self, bench: Bench, members: Members, step: float, *, full: bool = False) -> bool:
        """One loss, if that is allowed; True when it agrees."""
        result = bench.ahead(bench.moves(members, full=full), step) if self.settings.quick else None
        if result is None or not result.agrees:
            return False
        self.accept(members, result)
        return True

    def together_right(self, bench: Bench, members: Members) -> bool:
        """Two losses; if they disagree, two more: a fault disagrees again, a kink crossed by chance does not."""
        for again, step in ((bench, self.settings.step), (self.bench(self.problem, 5), self.settings.step / 8)):
            result = again.test([again.moves(members)], (step,))[0]
            if result.agrees:
                self.accept(members, result)
                return True
        return False

    def strengthen(self, bench: Bench) -> None:
        """Judge tensors that hardly move the loss, with longer and longer steps: together, and then one by one.

        What agrees only roughly together may agree sharply alone: terms of higher order that couple tensors are absent.
        """
        for power in (2, 4):  # an agreement needs no second step to be believed
            weak = self.having("weak")
            if not weak.any():
                return
            longer = self.bench(self.problem, 0, slack=30.0)
            result = longer.test([longer.moves(weak, full=True)], (self.settings.step * 16.0**power,))[0]
            if not result.agrees:
                break
            self.accept(weak, result, sharp=True)
        steps = tuple(self.settings.step * 16.0**k for k in range(6))
        weak = self.having("weak")
        for group in [
            weak,
            *(single(self.count, int(j)) for j in np.flatnonzero(weak)[::-1][: self.settings.confirmations]),
        ]:
            still = group & self.having("weak")
            if still.any():
                sharp = still.sum() > 1
                self.confirm(self.sift(bench, still, steps, full=True, sharp=sharp), steps)
        for j in np.flatnonzero(self.having("weak")):
            self.set(int(j), "inconclusive", np.nan, float(self.outcome.bars[j]), self.why_weak())

    def why_weak(self) -> str:
        usual = self.settings.noise * EPSILON * abs(self.problem.loss)
        if self.ledger.noise > 100 * usual:
            share = self.ledger.noise / max(abs(self.problem.loss), _TINY)
            return f"the loss is noisy: equal evaluations differ by {share:.0e} of its value"
        return "its part of the loss is below the rounding noise of float64 at every step tried"

    def having(self, verdict: str) -> Members:
        return np.array([v == verdict for v in self.outcome.verdicts])

    def sift(
        self,
        bench: Bench,
        members: Members,
        steps: Sequence[float],
        *,
        full: bool = False,
        sharp: bool = False,
    ) -> Members:
        """Pass what agrees, halve what does not; returns the tensors that disagree when moved alone.

        Only one half is evaluated: slopes are linear, so the other half's is what is left of the whole.
        """
        wrong = np.zeros_like(members)
        move = bench.moves(members, full=full)
        whole = bench.test([move], steps)[0]
        if not whole.agrees and not self.ledger.noise:
            bench.measure_noise(move)
            whole = bench.test([move], steps)[0]
        waiting = [(members, whole)]
        while waiting:
            split = []
            for group, result in waiting:
                if result.agrees:
                    self.accept(group, result, sharp=sharp)
                elif group.sum() == 1:
                    wrong |= group
                    self.note(int(np.flatnonzero(group)[0]), result)
                else:
                    split.append((group, result))
            halves = [_halves(group) for group, _ in split]
            tested = bench.test([bench.moves(first, full=full) for first, _ in halves], steps)
            waiting = []
            for (_, result), (first, second), part in zip(split, halves, tested, strict=True):
                rest = result.without(part)
                if not rest.finite:
                    rest = bench.test([bench.moves(second, full=full)], steps)[0]
                waiting += [(first, part), (second, rest)]
        return wrong

    def accept(self, group: Members, result: Gap, *, sharp: bool = False) -> None:
        """Write ``ok``, ``zero`` or ``weak`` for a group that agrees; ``sharp`` asks for a small error."""
        total = max(result.total, _TINY)
        rough = sharp and abs(result.gap) > self.settings.sharp * total
        for j in np.flatnonzero(group):
            share = abs(float(result.shares[j]))
            if self.zero[j]:
                # The tensor moved by its own size and the loss did not follow beyond the bar.
                typical = max(float(np.median(self.problem.scales * self.problem.norms)), abs(self.problem.loss), _TINY)
                self.set(int(j), "zero", abs(result.gap) / typical, result.bar / typical, "")
            elif self.settings.resolution * share >= 2 * result.bar and not rough:
                # Negative control: one per cent planted in this tensor alone must be seen by this very comparison.
                planted = replace(result, gap=abs(result.gap) + self.settings.resolution * share)
                self.outcome.awake &= not planted.agrees
                self.set(int(j), "ok", abs(result.gap) / total, result.bar / share, "")
            else:
                self.set(int(j), "weak", abs(result.gap) / total, result.bar / share if share else np.inf, "")

    def note(self, j: int, result: Gap) -> None:
        """Write down a disagreement that is still to be confirmed."""
        share = max(abs(float(result.shares[j])), abs(result.numeric), _TINY)
        self.set(j, "mismatch", abs(result.gap) / share, result.bar / share, "")

    def set(self, j: int, verdict: str, error: float, bar: float, reason: str) -> None:
        self.outcome.verdicts[j], self.outcome.reasons[j] = verdict, reason
        self.outcome.errors[j], self.outcome.bars[j] = error, bar
        self.outcome.factors[j] = np.nan

    def confirm(self, suspects: Members, steps: Sequence[float]) -> None:
        """Look at suspects again with fresh directions, here and nearby, before anything is said about them."""
        if not suspects.any():
            return
        ordered = np.flatnonzero(suspects)[::-1]  # nearest the loss first
        limit = self.settings.confirmations
        pairs = self.look(self.bench(self.problem, 1), ordered[:limit], steps)
        doubtful = []
        for j, pair in pairs.items():
            if not all(result.finite for result in pair):
                self.set(j, "inconclusive", np.nan, np.inf, "the loss is NaN or Inf beside this point")
            elif all(result.agrees for result in pair):
                self.accept(single(self.count, j), max(pair, key=lambda result: result.total))  # it did not repeat
            else:
                doubtful.append(j)
        self.nearby(doubtful, pairs, ordered[limit:], steps)

    def look(self, bench: Bench, indices: Sequence[int] | np.ndarray, steps: Sequence[float]) -> dict[int, list[Gap]]:
        """Per tensor the results along its random and along its aligned direction, moved alone."""
        moves = [move for j in indices for move in bench.apart(int(j))]
        results = bench.test(moves, steps, jumps=True)
        return {int(j): results[2 * k : 2 * k + 2] for k, j in enumerate(indices)}

    def nearby(
        self, doubtful: list[int], pairs: dict[int, list[Gap]], rest: np.ndarray, steps: Sequence[float]
    ) -> None:
        """Judge doubtful tensors at a jittered point: wrong there means wrong, right there a kink or a lone point.

        Kinks that sit exactly at the base (zero biases on blank pixels, ties) are left behind by the jitter. Its bar is
        wider, since some of them may be met again.
        """
        shorter = tuple(step / 2 for step in steps)
        for attempt, size in enumerate(self.settings.jitter):
            if not doubtful and not len(rest):
                return
            problem = self.problem.jittered(size, self.seed + 7 + attempt)
            if not np.isfinite(problem.loss) or not np.isfinite(problem.norms).all():
                break
            bench = self.bench(problem, 2 + attempt, slack=30.0)
            rest = self.together(bench, rest, shorter)
            kinked, lone = [], []
            for j, near in self.look(bench, doubtful, shorter).items():
                if all(result.agrees for result in near):
                    lone.append(j)
                elif all(result.agrees or result.smooth(self.settings.kink) for result in near):
                    smooth = all(result.smooth(self.settings.kink) for result in pairs[j])
                    self.describe(j, pairs[j] if smooth else near)
                else:
                    kinked.append(j)
            self.at_point(lone, pairs)
            doubtful = kinked
        for j in [*doubtful, *(int(k) for k in rest)]:
            self.set(j, "inconclusive", np.nan, np.inf, "kinks at every point tried: slopes jump within the step")

    def together(self, bench: Bench, rest: np.ndarray, steps: Sequence[float]) -> np.ndarray:
        """Confirm suspects beyond the limit as one group; returns those still open."""
        if not len(rest):
            return rest
        group = np.zeros(self.count, bool)
        group[rest] = True
        result = bench.test([bench.moves(group)], steps, jumps=True)[0]
        if result.agrees:
            for j in rest:
                self.set(int(j), "kink", float(self.outcome.errors[j]), float(self.outcome.bars[j]), _KINK)
        elif not result.smooth(self.settings.kink):
            return rest
        return rest[:0]

    def at_point(self, indices: list[int], pairs: dict[int, list[Gap]]) -> None:
        """Tensors right nearby and not here: kinks, unless one entry shows a gradient that its kink cannot give."""
        looked_at = indices[: self.settings.entries]
        samples = self.samples() if looked_at else []
        for j in indices:
            reason = self.evidence(j, samples) if j in looked_at else ""
            if reason:
                self.describe(j, pairs[j])
            else:
                worst = max(pairs[j], key=lambda result: abs(result.gap))
                reference = max(worst.total, abs(worst.numeric), _TINY)
                self.set(j, "kink", abs(worst.gap) / reference, worst.bar / reference, _KINK)
            self.outcome.reasons[j] = reason or _KINK

    def samples(self) -> list[Problem]:
        """Points all around the base, each on some side of every kink that meets there."""
        size = self.settings.jitter[0]
        found = [self.problem.jittered(size, self.seed + 50 + k) for k in range(self.settings.samples)]
        return [problem for problem in found if np.isfinite(problem.norms).all()]

    def evidence(self, j: int, samples: Sequence[Problem]) -> str:
        """Why a tensor's gradient is wrong at the base though right nearby; ``""`` unless every entry tried says so."""
        reasons = []
        for turn in range(20, 20 + self.settings.entries):
            start, stop = self.some_entry(j, turn)
            result = self.entry_test(j, turn, start, stop)
            if result.finite and not result.agrees:
                reasons.append(self.entry_evidence(j, turn, start, stop, result, samples))
        return reasons[0] if reasons and all(reasons) else ""

    def entry_evidence(self, j: int, turn: int, start: int, stop: int, result: Gap, samples: Sequence[Problem]) -> str:
        """Why the gradient of one entry is wrong at the base, or ``""`` if a kink allows it.

        Where a single kink meets the entry, the slopes around the base are its left and its right one, and the gradient
        must lie between. Where many kinks meet, other slopes are seen around, and an honest subgradient may lie
        outside: nothing is said then.
        """
        kinked = not result.smooth(self.settings.kink)
        if kinked and result.inside():
            return ""
        left, right = result.numeric - result.jump / 2, result.numeric + result.jump / 2
        slack = 4 * result.bar + 2e-2 * (abs(result.gap) + abs(result.jump))
        for problem in samples:
            slope = float(problem.line(self.line_seed(turn), (j, start, stop)).slopes[0, j]) * self.problem.scales[j]
            if min(abs(slope - left), abs(slope - right)) > slack:
                return ""
        return _OUTSIDE if kinked else _POINTWISE

    def some_entry(self, j: int, turn: int) -> tuple[int, int]:
        """The range of a single entry that disagrees, found by halving; of two halves that disagree, one by chance."""
        generator = np.random.default_rng([abs(self.seed), turn])
        start, stop = 0, int(self.problem.sizes[j])
        whole = self.entry_test(j, turn, start, stop)
        while stop - start > 1:
            middle = (start + stop) // 2
            first = self.entry_test(j, turn, start, middle)
            rest = whole.without(first)
            takes_first = generator.random() < 0.5 if first.agrees == rest.agrees else rest.agrees
            start, stop, whole = (start, middle, first) if takes_first else (middle, stop, rest)
        return start, stop

    def entry_test(self, j: int, turn: int, start: int, stop: int) -> Gap:
        bench = self.bench(self.problem, turn, part=(j, start, stop))
        move = np.zeros((2, self.count))
        move[0, j] = self.problem.scales[j]
        return bench.test([move], (self.settings.step,), jumps=True)[0]

    def describe(self, j: int, pair: list[Gap]) -> None:
        """Error, bar and factor of one confirmed wrong tensor."""
        random, aligned = pair
        norm = abs(float(aligned.shares[j]))
        swing = float(self.problem.scales[j] * self.problem.norms[j])
        reference = max(norm, abs(aligned.numeric), abs(random.numeric), _TINY)
        error = max(abs(aligned.gap) / reference, abs(random.gap) / max(swing, abs(random.numeric), _TINY))
        self.set(j, "mismatch", error, max(aligned.bar, random.bar) / reference, "")
        self.outcome.factors[j] = self.factor(j, random, aligned)

    def factor(self, j: int, random: Gap, aligned: Gap) -> float:
        """Analytic / numeric slope, if this one number also holds across the gradient, along the random direction."""
        if float(aligned.shares[j]) == 0.0:
            return 0.0
        if abs(aligned.numeric) <= 4 * aligned.bar:
            return np.nan
        factor = float(aligned.shares[j]) / aligned.numeric
        across = float(random.shares[j])
        left_over = abs(factor * random.numeric - across)
        return factor if left_over <= 1e-3 * abs(across) + 4 * random.bar else np.nan


def _halves(group: Members) -> tuple[Members, Members]:
    indices = np.flatnonzero(group)
    first = np.zeros_like(group)
    first[indices[: len(indices) // 2]] = True
    return first, group & ~first
