"""Rules that read the looks at the activations, on looks built by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from keras_gradwatch.findings import Ledger
from keras_gradwatch.records import STATISTICS, Activation, ActivationRecord, Finding, InputScale, TensorInfo, Window
from keras_gradwatch.rules import DEFAULT_RULES, DeadUnits, Saturated

UNITS = 32


def network(num_layers: int = 3) -> tuple[TensorInfo, ...]:
    """Dense layers ``d0`` … of 32 units; ``d0`` is nearest the input."""
    return tuple(
        TensorInfo(
            layer=f"d{k}", tensor=f"d{k}/{part}", role="weight", depth=k, shape=shape, layer_class="Dense",
            activation="relu", initializer="HeNormal",
        )
        for k in range(num_layers)
        for part, shape in (("kernel", (UNITS, UNITS)), ("bias", (UNITS,)))
    )  # fmt: skip


def activation(layer: int = 0, *, dead: float = 0.0, units: int = UNITS, **fields: object) -> Activation:
    """A relu whose first units are silent; nothing unusual about its biases."""
    silent = np.arange(units) < round(dead * units)
    names = [info.tensor for info in network(layer + 1)]
    fields = {
        "kind": "relu",
        "at_limit": max(dead, 0.5),
        "ceiling": np.where(silent, -0.1, 1.0),
        "bias": np.zeros(units),
        "own": tuple(names[-2:]),
        "upstream": tuple(names),
        "owner": f"d{layer}",
    } | fields
    return Activation(layer=f"d{layer}", layer_class="Dense", silent=silent, **fields)


def look(step: int, *activations: Activation, **fields: object) -> ActivationRecord:
    """128 samples of a model that has learned nothing yet."""
    fields = {"samples": 128, "loss": 2.3, "shuffled_loss": 2.3} | fields
    return ActivationRecord(step=step, activations=activations, **fields)


def window(*looks: ActivationRecord, losses: np.ndarray | None = None, **fields: object) -> Window:
    """Sixty steps at a flat loss, half of the run, and these looks."""
    tensors, count = network(), 60
    statistics = np.ones((count, len(tensors), len(STATISTICS)))
    statistics[:, :, STATISTICS.index("nonfinite_count")] = 0.0
    statistics[:, :, STATISTICS.index("update_ratio")] = 1e-3
    fields = {"planned_steps": 120, "statistics": statistics} | fields
    return Window(
        tensors=tensors,
        steps=np.arange(1, count + 1),
        epochs=np.zeros(count, dtype=np.int64),
        losses=np.full(count, 2.3) if losses is None else losses,
        loss_known=np.ones(count, dtype=bool),
        learning_rates=np.full(count, 0.01),
        connected=np.ones((count, len(tensors)), dtype=bool),
        activations=looks,
        **fields,
    )


def constant(*activations: Activation, steps: tuple[int, ...] = (1, 8, 16, 32), **fields: object) -> Window:
    """The same look again and again."""
    return window(*(look(step, *activations, **fields) for step in steps))


# ---------------------------------------------------------------- dead units


@pytest.mark.parametrize("dead", [0.0, 0.25, 0.45])
def test_a_few_silent_units_are_healthy(dead: float) -> None:
    """Less than half of a layer may be silent."""
    assert DeadUnits()(constant(activation(dead=dead))) == []


def test_half_of_a_layer_is_dead() -> None:
    """Three quarters of the units silent in every look are found, with the layer, the count and the share."""
    (found,) = DeadUnits()(constant(activation(0), activation(1, dead=0.75)))
    assert (found.finding, found.layer, found.value, found.limit) == ("dead_units", "d1", 0.75, 0.5)
    assert "24 of 32 units (75%) of d1" in found.message
    assert (found.first_step, found.last_step, found.severity) == (1, 32, "warning")
    assert found.tensors == ("d1/kernel", "d1/bias")


def test_different_units_silent_each_time_are_not_dead() -> None:
    """A unit that answers to some sample in any of the latest looks is alive: sparse activations are healthy."""
    first, second = activation(dead=0.6), activation(dead=0.6)
    second = replace(second, silent=second.silent[::-1].copy())
    assert DeadUnits()(window(*(look(s, first if s % 2 else second) for s in (1, 8, 15, 30)))) == []


def test_eight_samples_are_not_enough() -> None:
    """Three looks at 8 samples say nothing; thirteen do."""
    few = [look(s, activation(dead=0.8), samples=8) for s in range(1, 40, 10)]
    assert DeadUnits()(window(*few)) == []
    many = [look(s, activation(dead=0.8), samples=8) for s in range(1, 41, 3)]
    assert len(DeadUnits()(window(*many))) == 1


def test_a_start_that_recovers_is_no_alarm() -> None:
    """Looks within a few steps of the start are too early to tell."""
    assert DeadUnits()(constant(activation(dead=0.8), steps=(1, 2, 4, 8))) == []
    assert DeadUnits()(window(*(look(s, activation(dead=0.8 if s < 9 else 0.1)) for s in (1, 2, 4, 8, 16)))) == []


def test_a_run_of_three_steps_is_judged_at_its_end() -> None:
    """When no step will follow, there is nothing to wait for."""
    short = constant(activation(dead=1.0), steps=(1, 2, 3))
    assert DeadUnits()(short) == []
    assert len(DeadUnits()(replace(short, ended=True))) == 1


def test_negative_biases_are_the_cause() -> None:
    """Units that would be alive without their bias died of it, and the advice is to start it at 0."""
    sick = activation(dead=1.0, bias=np.full(UNITS, -10.0), ceiling=np.full(UNITS, -8.0))
    (found,) = DeadUnits()(constant(sick))
    assert "biases (median -10) outweigh all that enters (at most 2)" in found.message
    assert "bias_initializer" in found.advice
    assert found.severity == "error"


def test_a_shifted_input_is_the_cause() -> None:
    """A first layer that dies at the start under an input of mean −30 is told about the input."""
    shifted = (InputScale(name="table", mean=-30.0, std=1.0, largest=34.0),)
    (found,) = DeadUnits()(constant(activation(dead=1.0), inputs=shifted))
    assert "the input table has mean -30, standard deviation 1" in found.message
    assert "standardise" in found.advice


def test_one_large_step_is_the_cause() -> None:
    """Units that were alive before died of an update, whose size is told."""
    statistics = window().statistics.copy()
    statistics[4, 0, STATISTICS.index("update_ratio")] = 55.0
    looks = (look(2, activation()), *(look(s, activation(dead=1.0)) for s in (8, 16, 32)))
    (found,) = DeadUnits()(window(*looks, statistics=statistics))
    assert "they died after step 2; one update moved its weights by 55 of their size" in found.message
    assert found.first_step == 8
    assert "learning rate well below 0.01" in found.advice


def test_the_initialiser_is_named_otherwise() -> None:
    """Dead from the first step without a better reason: as initialised."""
    (found,) = DeadUnits()(constant(activation(1, dead=0.6)))
    assert "as initialised (HeNormal)" in found.message


def test_layers_with_one_cause_are_one_finding() -> None:
    """Layers behind a wholly dead one, and layers with the same reason, are listed under the worst."""
    (found,) = DeadUnits()(constant(activation(0, dead=0.6), activation(1, dead=1.0), activation(2, dead=1.0)))
    assert found.layer == "d1"
    assert "also d0 (19 of 32), d2 (32 of 32)" in found.message
    assert found.tensors == tuple(info.tensor for info in network())


def test_zero_gradients_before_a_dead_layer_are_its_consequence() -> None:
    """Whether told before or after, zero and vanishing gradients upstream are listed under the dead layer."""
    (dead,) = DeadUnits()(constant(activation(1, dead=1.0)))
    spoiled = ("d0/kernel", "d0/bias", "d1/kernel", "d1/bias", "d2/kernel")
    zero = Finding(finding="zero_gradient", layer="d1", first_step=1, last_step=25, message="zero", tensors=spoiled)
    for order in ([[zero], [dead]], [[dead], [zero]], [[zero, dead]]):
        ledger = Ledger()
        for step, found in enumerate(order):
            ledger.update(found, step)
        assert [f.finding for f in ledger.findings] == ["dead_units"]


def test_a_growing_entry_takes_back_what_it_explains() -> None:
    """Zero gradients told before a second layer of the same cause was seen dead go with it."""
    zero = Finding(finding="zero_gradient", layer="d2", first_step=1, last_step=9, message="z", tensors=("d2/bias",))
    ledger = Ledger()
    ledger.update([zero, *DeadUnits()(constant(activation(0, dead=0.6)))], 25)
    assert len(ledger.findings) == 2
    ledger.update(DeadUnits()(constant(activation(0, dead=0.6), activation(2, dead=1.0))), 50)
    assert [f.finding for f in ledger.findings] == ["dead_units"]


def test_zero_gradients_elsewhere_are_not_its_consequence() -> None:
    """A zero gradient behind the next layer has another cause."""
    (dead,) = DeadUnits()(constant(activation(0, dead=1.0)))
    zero = Finding(finding="zero_gradient", layer="d2", first_step=1, last_step=9, message="z", tensors=("d2/kernel",))
    ledger = Ledger()
    ledger.update([dead, zero], 25)
    assert {f.finding for f in ledger.findings} == {"dead_units", "zero_gradient"}


def test_the_same_dead_layers_stay_one_entry() -> None:
    """When another layer of the same cause becomes the worst, the entry stays under the name first told."""
    ledger = Ledger()
    ledger.update(DeadUnits()(constant(activation(0, dead=0.6), activation(1, dead=0.5))), 25)
    ledger.update(DeadUnits()(constant(activation(0, dead=0.6), activation(1, dead=0.9))), 50)
    assert [f.layer for f in ledger.findings] == ["d0"]


def test_small_layers_of_a_learning_model_are_left_alone() -> None:
    """Two of four units are often silent by chance; that matters only where nothing is learned."""
    assert DeadUnits()(constant(activation(dead=0.75, units=4), loss=0.2)) == []
    assert len(DeadUnits()(constant(activation(dead=0.75, units=4)))) == 1
    assert len(DeadUnits()(constant(activation(dead=0.75), loss=0.2))) == 1


def test_silent_outputs_are_healthy_unless_all_are() -> None:
    """A relu output may well be zero for most targets."""
    assert DeadUnits()(constant(activation(2, dead=0.8, output=True))) == []
    assert len(DeadUnits()(constant(activation(2, dead=1.0, output=True)))) == 1


def test_no_looks_no_units_no_finding() -> None:
    """Nothing to look at is nothing found."""
    assert DeadUnits()(window()) == Saturated()(window()) == []
    assert DeadUnits()(constant(activation(units=0))) == []
    assert not Saturated()(constant(tanh(0, math.nan)))


# ---------------------------------------------------------------- saturated


def tanh(layer: int, at_limit: float, **fields: object) -> Activation:
    return activation(layer, at_limit=at_limit, **({"kind": "tanh"} | fields))


def test_a_saturated_layer() -> None:
    """A hidden tanh layer at its limits, while the loss goes nowhere, is named with its share and cause."""
    (found,) = Saturated()(constant(tanh(0, 0.2), tanh(1, 0.9)))
    assert (found.finding, found.layer, found.value) == ("saturated", "d1", 0.9)
    assert "90% of the outputs of d1 are within 1 % of a limit of tanh" in found.message
    assert "as initialised" in found.message


def test_layers_at_their_middle_are_healthy() -> None:
    """Under half of the entries at a limit is common."""
    assert not Saturated()(constant(tanh(0, 0.4)))


def test_outputs_may_be_at_their_limits() -> None:
    """A sure classifier's sigmoid is at 0 or 1."""
    assert not Saturated()(constant(tanh(2, 0.99, kind="sigmoid", output=True)))


def test_a_model_that_has_learned_may_saturate() -> None:
    """What the predictions know of the targets clears it, and so does a falling loss."""
    assert not Saturated()(constant(tanh(1, 0.9), loss=0.2))
    halfway = constant(tanh(1, 0.9), loss=1.8)
    assert not Saturated()(replace(halfway, losses=np.geomspace(2.3, 1.0, 60)))
    assert len(Saturated()(halfway)) == 1


def test_a_loss_that_falls_to_a_constants_is_not_learning() -> None:
    """Where the start was bad, the loss may fall far although the predictions say nothing about the targets."""
    sick = constant(tanh(1, 0.9), loss=2.3)
    assert len(Saturated()(replace(sick, losses=np.geomspace(100.0, 2.3, 60)))) == 1
    unknown = constant(tanh(1, 0.9), shuffled_loss=math.nan)
    assert not Saturated()(replace(unknown, losses=np.geomspace(100.0, 2.3, 60)))


def test_early_in_the_run_it_is_too_soon_to_tell() -> None:
    """Less than half of the plan, or 500 steps, is patience."""
    early = replace(constant(tanh(1, 0.9)), planned_steps=1000)
    assert not Saturated()(early)
    assert len(Saturated()(replace(early, ended=True))) == 1


def test_unscaled_pixels_saturate_the_first_layer() -> None:
    """The input is named where it is the cause."""
    pixels = (InputScale(name="input", mean=77.0, std=96.0, largest=255.0),)
    (found,) = Saturated()(constant(tanh(0, 0.95), inputs=pixels))
    assert "the input input has mean 77" in found.message
    assert "standardise" in found.advice


def test_vanishing_before_a_saturated_layer_is_its_consequence() -> None:
    """One finding per cause."""
    (found,) = Saturated()(constant(tanh(1, 0.9)))
    fading = Finding(finding="vanishing", layer="d0", first_step=1, last_step=9, message="v", tensors=("d0/kernel",))
    ledger = Ledger()
    ledger.update([fading], 25)
    ledger.update([found], 50)
    assert [f.finding for f in ledger.findings] == ["saturated"]


def test_the_default_rules_hold_both() -> None:
    """The rules are asked by default."""
    assert {DeadUnits(), Saturated()} <= set(DEFAULT_RULES)
