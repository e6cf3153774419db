"""Rules for the course of the loss, on courses built by hand."""

from dataclasses import replace

import numpy as np
import pytest

from keras_gradwatch.findings import Ledger
from keras_gradwatch.progress import Oscillating, Stalled
from keras_gradwatch.records import STATISTICS, ActivationRecord, Finding, TensorInfo, Window
from keras_gradwatch.rules import DEFAULT_RULES

KERNEL = TensorInfo(layer="dense", tensor="dense/kernel", role="weight", depth=0, shape=(8, 8))


def window(losses: np.ndarray, *, update: float = 1e-3, **fields: object) -> Window:
    """A run of one weight with these losses per step, halfway through its plan."""
    count = len(losses)
    statistics = np.ones((count, 1, len(STATISTICS)))
    statistics[:, :, STATISTICS.index("nonfinite_count")] = 0.0
    statistics[:, :, STATISTICS.index("update_ratio")] = update
    fields = {"learning_rates": np.full(count, 0.01), "planned_steps": 2 * count} | fields
    return Window(
        tensors=(KERNEL,),
        steps=np.arange(1, count + 1),
        epochs=np.zeros(count, dtype=np.int64),
        losses=losses,
        loss_known=np.ones(count, dtype=bool),
        statistics=statistics,
        connected=np.ones((count, 1), dtype=bool),
        **fields,
    )


def by_epochs(losses: list[float] | np.ndarray, noise: float = 0.01) -> Window:
    losses = np.asarray(losses, dtype=float)
    return window(losses.repeat(5), epoch_losses=losses, epoch_noise=np.full(len(losses), noise))


# ---------------------------------------------------------------- oscillating


def test_a_loss_that_swings_is_found_with_advice_on_the_rate() -> None:
    """Up and down by half its level: how much, between what, and a lower learning rate."""
    (found,) = Oscillating()(by_epochs([2.0, 1.0, 1.5, 1.0, 1.5, 1.0, 1.5, 1.0]))
    assert (found.finding, found.layer) == ("oscillating", "loss")
    assert found.value == pytest.approx(0.5)
    assert "swings by 50% of its level from epoch to epoch, between 1 and 1.5" in found.message
    assert "a learning rate of 0.003 or less (now 0.01)" in found.advice


@pytest.mark.parametrize(
    "losses",
    [
        np.geomspace(2.0, 0.01, 12),
        [2.0, 1.0, 1.05, 1.0, 1.04, 1.0, 1.05],
        [2.0, 1.0, 0.8, 0.7, 1.4, 0.9, 0.6, 0.5],
        [1.8, 1.7, 1.5, 1.17, 1.2, 0.98],
        [2.0, 0.004, 0.008, 0.004, 0.008, 0.004, 0.008],
        [2.0, 1.0, 1.5, 1.0],
        [2.0, 1.0, np.nan, 1.0, 1.5, 1.0, 1.5],
        [],
    ],
    ids=["falls", "small swings", "one bump", "bumps on the way down", "near zero", "too few epochs", "broken", "none"],
)
def test_healthy_courses_do_not_swing(losses: list[float]) -> None:
    """A falling loss, small swings, one bump of a restarted schedule, swings near zero, and the edges."""
    assert not Oscillating()(by_epochs(losses))


def test_swings_within_the_noise_of_the_batches_are_noise() -> None:
    """The same swings say nothing when an epoch's mean is only known to ±0.4."""
    assert not Oscillating()(by_epochs([2.0, 1.0, 1.5, 1.0, 1.5, 1.0, 1.5], noise=0.4))


# ---------------------------------------------------------------- stalled


def flat(count: int = 100, level: float = 2.3) -> np.ndarray:
    return level + 0.01 * np.random.default_rng(0).normal(size=count)


def test_a_tiny_learning_rate_is_the_cause() -> None:
    """A flat loss whose updates could not matter over the whole run: the rate is named and a better one told."""
    (found,) = Stalled()(window(flat(), update=1e-7))
    assert (found.finding, found.layer) == ("stalled", "loss")
    assert "the learning rate (0.01) is too small" in found.message
    assert found.advice == "a learning rate near 10"


def test_a_flat_loss_in_spite_of_updates() -> None:
    """Weights that move without effect are told apart from weights that do not move."""
    (found,) = Stalled()(window(flat(), update=1e-3))
    assert "but it does not help" in found.message


@pytest.mark.parametrize("last", [1.0, 2.1, 2.9])
def test_a_loss_that_moves_is_not_stalled(last: float) -> None:
    """Neither one that falls, by a tenth at least, nor one that grows, which is another fault."""
    assert not Stalled()(window(np.linspace(2.3, last, 100)))


def test_a_plateau_may_last_half_of_the_run() -> None:
    """It is too soon to tell before half of the plan is over, unless the run ends."""
    early = window(flat(), planned_steps=300)
    assert not Stalled()(early)
    assert Stalled()(replace(early, ended=True))


def test_a_warm_up_is_waited_for() -> None:
    """A learning rate that still rises has not had its chance."""
    assert not Stalled()(window(flat(), learning_rates=np.linspace(1e-6, 1e-4, 100)))


def test_a_model_that_knows_its_targets_has_converged() -> None:
    """Flat because nothing is left to learn: predictions given to other samples would be far worse."""
    looks = tuple(ActivationRecord(step=s, samples=128, loss=0.1, shuffled_loss=3.0) for s in (1, 50, 100))
    assert not Stalled()(window(flat(level=0.1), activations=looks))


def test_whatever_else_is_found_explains_a_stalled_loss() -> None:
    """It says that nothing else was found, so it gives way to any finding, early or late."""
    (stalled,) = Stalled()(window(flat()))
    other = Finding(finding="vanishing", layer="dense", first_step=60, last_step=90, message="v")
    for order in ([[stalled], [other]], [[other], [stalled]]):
        ledger = Ledger()
        for found in order:
            ledger.update(found, 100)
        assert [f.finding for f in ledger.findings] == ["vanishing"]


def test_few_steps_and_unknown_losses_are_no_evidence() -> None:
    """Edges: five steps, a loss that cannot be observed, no step at all."""
    assert not Stalled()(window(flat(5)))
    assert not Stalled()(replace(window(np.full(100, np.nan)), loss_known=np.zeros(100, dtype=bool)))
    assert not Stalled()(window(np.zeros(0)))


def test_the_default_rules_hold_both() -> None:
    """The rules are asked by default."""
    assert {Oscillating(), Stalled()} <= set(DEFAULT_RULES)
