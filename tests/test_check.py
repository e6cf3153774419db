"""The check alone, against small analytic problems: no framework, every exact answer from algebra."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from keras_gradwatch.check import CheckSettings, Outcome, check_problem

Arrays = list[np.ndarray]


class Toy:
    """A loss of a few arrays with the gradient somebody claims for it."""

    def __init__(
        self, loss: Callable[[Arrays], float], gradient: Callable[[Arrays], Arrays], values: Sequence[np.ndarray]
    ) -> None:
        self._loss, self._gradient = loss, gradient
        self.values = [np.asarray(v, float) for v in values]
        self.claimed = [np.asarray(g, float) for g in gradient(self.values)]
        self.loss = float(loss(self.values))
        rms = np.array([np.sqrt(np.mean(v**2)) if v.size else 0.0 for v in self.values])
        self.scales = np.maximum(rms, 0.05)
        self.norms = np.array([np.linalg.norm(g) for g in self.claimed])
        self.sizes = np.array([float(v.size) for v in self.values])
        self.evaluations = 0

    def line(self, seed: int, part: tuple[int, int, int] | None = None) -> ToyLine:
        return ToyLine(self, seed, part)

    def jittered(self, size: float, seed: int) -> Toy:
        generator = np.random.default_rng([seed, 1])
        moved = [
            v + size * s * generator.standard_normal(v.shape) for v, s in zip(self.values, self.scales, strict=True)
        ]
        return Toy(self._loss, self._gradient, moved)


class ToyLine:
    def __init__(self, toy: Toy, seed: int, part: tuple[int, int, int] | None) -> None:
        generator = np.random.default_rng([seed, 0])
        self._toy = toy
        self._random = [generator.standard_normal(v.shape) for v in toy.values]
        if part is not None:
            j, start, stop = part
            inside = np.arange(toy.values[j].size).reshape(toy.values[j].shape)
            self._random[j] = np.where((inside >= start) & (inside < stop), self._random[j], 0.0)
        self._aligned = [g / max(np.linalg.norm(g), 1e-300) for g in toy.claimed]
        self.slopes = np.array(
            [
                [np.sum(g * d) for g, d in zip(toy.claimed, self._random, strict=True)],
                [np.sum(g * d) for g, d in zip(toy.claimed, self._aligned, strict=True)],
            ]
        )

    def entry(self, j: int, index: int) -> float:
        return float(self._random[j].flat[index])

    def losses(self, coefficients: np.ndarray) -> np.ndarray:
        toy = self._toy
        toy.evaluations += len(coefficients)
        return np.array(
            [
                toy._loss(
                    [
                        v + a * r + b * g
                        for v, r, g, a, b in zip(toy.values, self._random, self._aligned, *c, strict=True)
                    ]
                )
                for c in coefficients
            ]
        )


def values(seed: int = 0, shapes: Sequence[tuple[int, ...]] = ((4, 5), (5,), (3, 2), (2,))) -> Arrays:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(shape) for shape in shapes]


def quartic(scale: float = 1.0, weights: Sequence[float] = (1.0, 1.0, 1.0, 1.0)) -> tuple[Callable, Callable]:
    """Smooth, coupled by its square, with a gradient in closed form."""

    def loss(v: Arrays) -> float:
        inner = sum(w * np.sum(a**2 + 0.3 * a**3) for w, a in zip(weights, v, strict=True))
        return float(scale * (inner + 0.01 * inner**2))

    def gradient(v: Arrays) -> Arrays:
        inner = sum(w * np.sum(a**2 + 0.3 * a**3) for w, a in zip(weights, v, strict=True))
        return [scale * (1 + 0.02 * inner) * w * (2 * a + 0.9 * a**2) for w, a in zip(weights, v, strict=True)]

    return loss, gradient


def planted(gradient: Callable[[Arrays], Arrays], index: int, fault: Callable[[np.ndarray], np.ndarray]) -> Callable:
    def wrong(v: Arrays) -> Arrays:
        found = gradient(v)
        found[index] = fault(found[index])
        return found

    return wrong


def one_entry_doubled(g: np.ndarray) -> np.ndarray:
    g = g.copy()
    g.flat[1] *= 2
    return g


FAULTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "times 1.01": lambda g: 1.01 * g,
    "times 1.1": lambda g: 1.1 * g,
    "sign": lambda g: -g,
    "zero": lambda g: 0.0 * g,
    "rolled": lambda g: np.roll(g, 1, axis=0),
    "one entry doubled": one_entry_doubled,
    "constant added": lambda g: g + 0.1 * np.linalg.norm(g),
}


def check(loss: Callable, gradient: Callable, at: Arrays, seed: int = 0) -> Outcome:
    return check_problem(Toy(loss, gradient, at), seed)


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_a_right_gradient_passes_with_two_evaluations(scale: float) -> None:
    """A smooth loss with its own gradient is ok everywhere after two losses, at any scale of the loss."""
    for seed in range(20):
        outcome = check(*quartic(scale), values(seed), seed)
        assert outcome.verdicts == ["ok"] * 4
        assert outcome.evaluations == 2
        assert outcome.awake
        assert np.all(outcome.errors <= 1e-6)
        assert np.all(outcome.bars <= 0.5e-2)  # half of the resolution promised by the settings


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_in_its_tensor_alone(fault: str, scale: float) -> None:
    """Each kind of fault is a mismatch in the tensor that has it, and nowhere else."""
    loss, gradient = quartic(scale)
    for index in range(4):
        if fault == "rolled" and index == 3:
            continue  # rolling two entries of nearly equal slope is hardly a fault
        outcome = check(loss, planted(gradient, index, FAULTS[fault]), values(index), index)
        assert [v == "mismatch" for v in outcome.verdicts] == [j == index for j in range(4)], outcome.verdicts
        assert outcome.errors[index] > outcome.bars[index]


@pytest.mark.parametrize(("fault", "factor"), [("times 1.1", 1.1), ("times 1.01", 1.01), ("sign", -1.0), ("zero", 0.0)])
def test_the_factor_is_told_where_one_number_describes_the_fault(fault: str, factor: float) -> None:
    """A gradient times a number is reported with that number."""
    loss, gradient = quartic()
    outcome = check(loss, planted(gradient, 1, FAULTS[fault]), values())
    assert outcome.factors[1] == pytest.approx(factor, abs=1e-4)


@pytest.mark.parametrize("fault", ["rolled", "one entry doubled", "constant added"])
def test_no_factor_is_told_where_none_describes_the_fault(fault: str) -> None:
    """A fault that is no multiple has no factor."""
    loss, gradient = quartic()
    assert np.isnan(check(loss, planted(gradient, 0, FAULTS[fault]), values()).factors[0])


def test_faults_that_cancel_in_the_sum_are_both_found() -> None:
    """Ten per cent too much in one tensor and ten per cent too little in another do not hide each other."""
    loss, gradient = quartic()
    wrong = planted(planted(gradient, 0, lambda g: 1.1 * g), 1, lambda g: 0.9 * g)
    for seed in range(20):
        assert check(loss, wrong, values(seed), seed).verdicts == ["mismatch", "mismatch", "ok", "ok"]


def test_a_small_tensor_does_not_drown() -> None:
    """A tensor that moves the loss a millionth as much as the others is still judged, and caught when it is wrong."""
    loss, gradient = quartic(weights=(1.0, 1e-6, 1.0, 1.0))
    for seed in range(10):
        assert check(loss, gradient, values(seed), seed).verdicts == ["ok"] * 4
        wrong = planted(gradient, 1, lambda g: 1.1 * g)
        assert check(loss, wrong, values(seed), seed).verdicts == ["ok", "mismatch", "ok", "ok"]


@pytest.mark.parametrize("weight", [1.0, 1e-3, 1e-6])
def test_a_gradient_zeroed_by_mistake_is_no_zero_gradient(weight: float) -> None:
    """A gradient of 0 where the slope is not is a mismatch, however little the tensor moves the loss."""
    loss, gradient = quartic(weights=(1.0, weight, 1.0, 1.0))
    for seed in range(10):
        outcome = check(loss, planted(gradient, 1, lambda g: 0 * g), values(seed), seed)
        assert outcome.verdicts == ["ok", "mismatch", "ok", "ok"]


def test_what_lies_below_the_rounding_of_the_loss_is_never_ok() -> None:
    """A tensor whose part of the loss is lost in its rounding is not certified, whether right or wrong."""
    loss, gradient = quartic(weights=(1.0, 1e-17, 1.0, 1.0))
    for wrong in (gradient, planted(gradient, 1, lambda g: 2.0 * g)):
        outcome = check(loss, wrong, values())
        assert outcome.verdicts[1] in ("inconclusive", "zero")
        assert outcome.verdicts[0] == "ok"


def test_a_tensor_the_loss_ignores_is_zero() -> None:
    """Gradient 0 and slope 0 is the verdict zero, rounding dust included."""
    loss, gradient = quartic()

    def ignoring(v: Arrays) -> float:
        return loss([v[0], v[2], v[2], v[3]])  # never reads v[1]; v[2] counts twice

    def its_gradient(dust: float) -> Callable:
        def claimed(v: Arrays) -> Arrays:
            g = gradient([v[0], v[2], v[2], v[3]])
            return [g[0], np.full(v[1].shape, dust), g[1] + g[2], g[3]]

        return claimed

    at = values(shapes=((4, 5), (7,), (3, 2), (2,)))
    for dust in (0.0, 1e-16):
        assert check(ignoring, its_gradient(dust), at).verdicts == ["ok", "zero", "ok", "ok"]


def test_everything_may_be_zero() -> None:
    """A constant loss with gradient 0 has only zero verdicts."""
    outcome = check(lambda v: 3.0, lambda v: [0 * a for a in v], values())
    assert outcome.verdicts == ["zero"] * 4


def absolute(offset: float, claimed_at_zero: float) -> tuple[Callable, Callable, Arrays]:
    """Sum of |x| over a tensor, plus a smooth part; the gradient at 0 is whatever is claimed."""

    def loss(v: Arrays) -> float:
        return float(np.sum(np.abs(v[0])) + np.sum(v[1] ** 2))

    def gradient(v: Arrays) -> Arrays:
        return [np.where(v[0] == 0, claimed_at_zero, np.sign(v[0])), 2 * v[1]]

    return loss, gradient, [np.full(6, offset), np.linspace(0.5, 1.5, 4)]


@pytest.mark.parametrize("claimed", [-1.0, 0.0, 0.5, 1.0])
def test_a_subgradient_between_left_and_right_slope_is_a_kink(claimed: float) -> None:
    """At a kink every number between the two slopes passes, and the smooth tensor is ok."""
    allowed = ("zero", "kink") if claimed == 0 else ("kink",)  # 0 is the central difference of |x| at 0
    for seed in range(20):
        verdicts = check(*absolute(0.0, claimed), seed).verdicts
        assert verdicts[0] in allowed
        assert verdicts[1] == "ok"


@pytest.mark.parametrize("claimed", [-3.0, 1.5, 3.0, 100.0])
def test_a_subgradient_outside_left_and_right_slope_is_a_mismatch(claimed: float) -> None:
    """At a kink a number beyond both slopes is wrong."""
    for seed in range(20):
        assert check(*absolute(0.0, claimed), seed).verdicts == ["mismatch", "ok"]


def test_beside_a_kink_the_gradient_must_be_right() -> None:
    """Away from the kink by more than the step, |x| is judged like any smooth loss."""
    loss, gradient, at = absolute(1e-3, 0.0)
    assert check(loss, gradient, at).verdicts == ["ok", "ok"]
    assert check(loss, planted(gradient, 0, lambda g: 1.01 * g), at).verdicts == ["mismatch", "ok"]


def test_a_gradient_wrong_at_one_point_of_a_smooth_loss_is_a_mismatch() -> None:
    """relu(x) − relu(−x) is x: its gradient at 0 is 1, and 0 is wrong although both kinks alone would allow it."""

    def loss(v: Arrays) -> float:
        return float(np.sum(np.maximum(v[0], 0) - np.maximum(-v[0], 0)) + np.sum(v[1] ** 2))

    def gradient(v: Arrays) -> Arrays:
        return [np.where(v[0] == 0, 0.0, 1.0), 2 * v[1]]

    for seed in range(20):
        assert check(loss, gradient, [np.zeros(3), np.ones(4)], seed).verdicts == ["mismatch", "ok"]


class ReluNet:
    """x → relu(x·A + a) → relu(·B + b) → squared error, with blank rows and zero biases: kinks at the base."""

    def __init__(self, seed: int, rows: int = 16, blank: int = 0, at_zero: float = 0.0) -> None:
        generator = np.random.default_rng(seed)
        self.at_zero = at_zero
        self.x = generator.standard_normal((rows, 6))
        self.x[:blank] = 0.0
        self.y = generator.standard_normal((rows, 3))
        self.at = [
            generator.standard_normal((6, 12)) * 0.4, np.zeros(12),
            generator.standard_normal((12, 3)) * 0.3, np.zeros(3),
            self.x.copy(),
        ]  # fmt: skip

    def slope(self, z: np.ndarray) -> np.ndarray:
        return np.where(z == 0, self.at_zero, (z > 0).astype(float))

    def loss(self, v: Arrays) -> float:
        hidden = np.maximum(v[4] @ v[0] + v[1], 0)
        return float(np.mean((np.maximum(hidden @ v[2] + v[3], 0) - self.y) ** 2))

    def gradient(self, v: Arrays) -> Arrays:
        a, b, c, d, x = v
        z = x @ a + b
        hidden = np.maximum(z, 0)
        u = hidden @ c + d
        du = 2 * (np.maximum(u, 0) - self.y) / self.y.size * self.slope(u)
        dz = (du @ c.T) * self.slope(z)
        return [x.T @ dz, dz.sum(0), hidden.T @ du, du.sum(0), dz @ a.T]


@pytest.mark.parametrize("at_zero", [0.0, 0.5, 1.0])
def test_many_kinks_at_once_raise_no_alarm(at_zero: float) -> None:
    """Hundreds of units exactly at their kink, with weights of both signs behind them, are kinks and no mismatch."""
    for seed in range(60):
        net = ReluNet(seed, blank=6, at_zero=at_zero)
        outcome = check(net.loss, net.gradient, net.at, seed)
        assert set(outcome.verdicts) <= {"ok", "kink"}, (seed, outcome.verdicts)


def test_a_fault_is_found_at_kinks_too() -> None:
    """One per cent in one tensor is a mismatch although the base point sits on hundreds of kinks."""
    for seed in range(20):
        net = ReluNet(seed, blank=6)
        outcome = check(net.loss, planted(net.gradient, seed % 4, lambda g: 1.01 * g), net.at, seed)
        assert outcome.verdicts[seed % 4] == "mismatch", (seed, outcome.verdicts)
        assert outcome.verdicts.count("mismatch") == 1


def test_random_kinks_nearby_raise_no_alarm() -> None:
    """Two hundred ReLU nets at generic points: everything ok, worst error below 1e-6."""
    for seed in range(200):
        net = ReluNet(seed, rows=32)
        outcome = check(net.loss, net.gradient, net.at, seed)
        assert outcome.verdicts == ["ok"] * 5, (seed, outcome.verdicts)
        assert np.all(outcome.errors <= 1e-6)


def test_ties_of_a_maximum_are_kinks() -> None:
    """The gradient of a maximum over equal entries, given to one or shared among all, is a kink."""

    def loss(v: Arrays) -> float:
        return float(np.max(v[0]) + np.sum(v[1] ** 2))

    def one(v: Arrays) -> Arrays:
        return [np.eye(len(v[0]))[np.argmax(v[0])], 2 * v[1]]

    def shared(v: Arrays) -> Arrays:
        tied = v[0] == v[0].max()
        return [tied / tied.sum(), 2 * v[1]]

    for seed in range(20):
        for claimed in (one, shared):
            assert check(loss, claimed, [np.ones(4), np.ones(3)], seed).verdicts == ["kink", "ok"]


@pytest.mark.parametrize("size", [1e-14, 1e-11, 1e-8])
def test_noise_of_the_loss_is_measured_and_never_called_a_fault(size: float) -> None:
    """Deterministic noise of the loss, far above its last digit, widens the bar; a large fault still shows."""
    loss, gradient = quartic()

    def noisy(v: Arrays) -> float:
        digits = float(sum(np.sum(np.sin(1e13 * a)) for a in v))  # changes wildly from one float to the next
        return loss(v) + size * np.sin(1e3 * digits)

    for seed in range(20):
        right = check(noisy, gradient, values(seed), seed)
        assert set(right.verdicts) <= {"ok", "inconclusive"}, right.verdicts
        wrong = check(noisy, planted(gradient, 0, lambda g: 3 * g), values(seed), seed)
        assert wrong.verdicts[0] in ("mismatch", "inconclusive")
        assert "mismatch" not in wrong.verdicts[1:]
        if size <= 1e-11:
            assert right.verdicts == ["ok"] * 4
            assert wrong.verdicts[0] == "mismatch"


def test_a_large_constant_does_not_make_gradients_wrong() -> None:
    """A loss of 1e7 with slopes near 1 is judged with longer steps: ok, and a fault of ten per cent is found."""
    loss, gradient = quartic()

    def high(v: Arrays) -> float:
        return loss(v) + 1e7

    for seed in range(10):
        assert check(high, gradient, values(seed), seed).verdicts == ["ok"] * 4
        wrong = check(high, planted(gradient, 2, lambda g: 1.1 * g), values(seed), seed)
        assert wrong.verdicts == ["ok", "ok", "mismatch", "ok"]


def test_sizes_zero_and_one_and_tensors_left_out() -> None:
    """Empty tensors and tensors that are no candidates get no verdict; one number is judged like any tensor."""

    def loss(v: Arrays) -> float:
        return float(np.sum(v[0]) + np.sin(v[1][0]) + np.sum(v[2] ** 2))

    def gradient(v: Arrays) -> Arrays:
        return [np.ones_like(v[0]), np.cos(v[1]), 3 * v[2]]

    toy = Toy(loss, gradient, [np.zeros((0, 3)), np.array([0.3]), np.ones(2)])
    outcome = check_problem(toy, 0, candidates=np.array([True, True, False]))
    assert outcome.verdicts == ["", "ok", ""]
    assert toy.evaluations == outcome.evaluations == 2


def test_hundreds_of_tensors_cost_no_more_until_one_is_wrong() -> None:
    """Two losses judge three hundred tensors; one fault among them costs a few dozen more."""

    def loss(v: Arrays) -> float:
        return float(sum(np.sum(a**2) for a in v))

    def gradient(v: Arrays) -> Arrays:
        return [2 * a for a in v]

    at = values(3, [(3, 3)] * 300)
    assert check(loss, gradient, at).evaluations == 2
    outcome = check(loss, planted(gradient, 123, lambda g: 1.05 * g), at)
    assert [j for j, v in enumerate(outcome.verdicts) if v == "mismatch"] == [123]
    assert outcome.evaluations <= 80


def test_the_same_seed_gives_the_same_outcome() -> None:
    """A check is a function of the problem and the seed."""
    net = ReluNet(0, blank=6)
    first, second = (check(net.loss, net.gradient, net.at, 5) for _ in range(2))
    np.testing.assert_array_equal(first.errors, second.errors)
    assert first.verdicts == second.verdicts


def test_the_negative_control_falls_asleep_with_the_loss() -> None:
    """A comparison that could not have seen one per cent certifies nothing."""
    loss, gradient = quartic()
    outcome = check_problem(Toy(loss, gradient, values()), 0, CheckSettings(floor=0.1))
    assert "ok" not in outcome.verdicts
