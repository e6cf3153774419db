"""Where inside a wrong tensor: its wrong entries, found by halving instead of two losses per entry. Pure NumPy."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keras_gradwatch.records import Evidence
from keras_gradwatch.slopes import Bench, CheckSettings, Gap, Ledger, Problem

#: Entries named per tensor, entries tried at random to tell how many are wrong, and stretches halved at most. Our
#: choice: a fault in one entry of n is found with log2(n) halvings, five of them with 5 · log2(n).
_NAMED, _SAMPLED, _HALVINGS = 5, 8, 120


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is wrong.

    Attributes:
        words: which entries, in words.
        evidence: slopes along its two directions, and of the worst entries found.
        evaluations: losses spent.
    """

    words: str
    evidence: tuple[Evidence, ...]
    evaluations: int


def locate(problem: Problem, j: int, name: str, shape: Sequence[int], settings: CheckSettings, seed: int) -> Place:
    """The worst entries of a tensor whose gradient is wrong, and how far the fault spreads.

    The stretch of entries with the largest gap is halved first. Slopes are linear, so only one half costs losses; what
    agrees is left alone.

    Args:
        problem: the loss around its base point.
        j: index of the tensor.
        name: its name, for the evidence.
        shape: its shape.
        settings: numbers behind the verdicts.
        seed: of the directions.

    Returns:
        The place; without entries when the tensor disagrees along its whole, but nowhere beyond the bar in parts.
    """
    search = _Search(problem, j, settings, seed)
    along = search.whole(name)
    found, complete = search.worst()
    share = search.sampled()
    pairs = [(search.entry(name, shape, start, gap), start) for start, gap in found]
    pairs.sort(key=lambda pair: -pair[0].error)
    entries = [entry for entry, _ in pairs]
    places = [_index_of(start, shape) for _, start in pairs]
    words = _words(places, shape, complete, share)
    return Place(words, (*along, *entries), search.ledger.evaluations)


class _Search:
    """Tests of stretches of one tensor."""

    def __init__(self, problem: Problem, j: int, settings: CheckSettings, seed: int) -> None:
        self.problem, self.j, self.settings, self.seed = problem, j, settings, seed
        self.ledger = Ledger()
        self.count = len(problem.sizes)
        self.size = int(problem.sizes[j])
        self.random = np.random.default_rng([abs(seed), 11])

    def whole(self, name: str) -> list[Evidence]:
        """The slopes along the two directions of the whole tensor."""
        bench = self._bench(None)
        moves = bench.apart(self.j)
        results = bench.test(moves, (self.settings.step,))
        names = ("random", "gradient")
        return [
            self._evidence(name, words, float(move[k, self.j]), result)
            for k, (words, move, result) in enumerate(zip(names, moves, results, strict=True))
        ]

    def worst(self) -> tuple[list[tuple[int, Gap]], bool]:
        """Entries with large gaps, and whether there are no others."""
        whole = self.test(0, self.size)
        waiting = [(-abs(whole.gap), 0, self.size, whole)]
        found: list[tuple[int, Gap]] = []
        for _ in range(_HALVINGS):
            if not waiting or len(found) == _NAMED:
                break
            _, start, stop, gap = heapq.heappop(waiting)
            if stop - start == 1:
                found.append((start, self.test(start, stop)))
                continue
            middle = (start + stop) // 2
            first = self.test(start, middle)
            # A difference of two gaps has the bar of both: measured anew before it grows wide.
            rest = gap.without(first) if gap.bar < 3 * first.bar else self.test(middle, stop)
            for begin, end, part in ((start, middle, first), (middle, stop, rest)):
                if not part.agrees:
                    heapq.heappush(waiting, (-abs(part.gap), begin, end, part))
        return [(start, gap) for start, gap in found if not gap.agrees], not waiting

    def sampled(self) -> tuple[int, int]:
        """Of single entries taken at random, how many are wrong, and how many were tried."""
        places = self.random.choice(self.size, min(_SAMPLED, self.size), replace=False)
        return sum(not self.test(int(p), int(p) + 1).agrees for p in places), len(places)

    def test(self, start: int, stop: int) -> Gap:
        """One comparison along a random direction within a stretch."""
        move = np.zeros((2, self.count))
        move[0, self.j] = self.problem.scales[self.j]
        return self._bench((self.j, start, stop)).test([move], (self.settings.step,))[0]

    def entry(self, name: str, shape: Sequence[int], start: int, gap: Gap) -> Evidence:
        """One entry's gradient beside its slope."""
        size = self._bench((self.j, start, start + 1)).line.entry(self.j, start)
        return self._evidence(name, _written(_index_of(start, shape)), size * float(self.problem.scales[self.j]), gap)

    def _bench(self, part: tuple[int, int, int] | None) -> Bench:
        seed = self.seed * 1009 + 31
        return Bench(self.problem, self.problem.line(seed, part), self.settings, self.ledger, seed)

    def _evidence(self, name: str, along: str, move: float, gap: Gap) -> Evidence:
        return Evidence(
            tensor=name, along=along, analytic=float(gap.shares[self.j]) / move, numeric=gap.numeric / move,
            bar=gap.bar / abs(move), delta=abs(move) * self.settings.step,
        )  # fmt: skip


def _words(places: Sequence[Sequence[int]], shape: Sequence[int], complete: bool, share: tuple[int, int]) -> str:
    """Which entries are wrong, in words."""
    if not places:
        return ""
    if int(np.prod(shape)) == 1:
        return ""
    if complete:
        return "wrong only in " + ", ".join(_written(place) for place in places)
    wrong, tried = share
    worst = f"worst seen {_written(places[0])}"
    common = _common(places, shape)
    if common and wrong < tried:
        return f"wrong in {common}, {worst}"
    return f"wrong in {wrong} of {tried} entries tried at random, {worst}"


def _common(places: Sequence[Sequence[int]], shape: Sequence[int]) -> str:
    """The row or column that holds all places, such as ``[:, 5]``; empty when there is none."""
    if len(places) < 3:
        return ""
    same = [len({place[axis] for place in places}) == 1 and size > 1 for axis, size in enumerate(shape)]
    if not any(same):
        return ""
    return "[" + ", ".join(str(places[0][a]) if same[a] else ":" for a in range(len(shape))) + "]"


def _index_of(start: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of a flat entry."""
    return tuple(int(i) for i in np.unravel_index(start, tuple(shape))) if len(shape) else ()


def _written(place: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, place)) + "]"
