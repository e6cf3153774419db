"""The rules, on windows built by hand: what a healthy run, each fault and each edge looks like in numbers."""

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from keras_gradwatch.records import STATISTICS, CheckResult, Culprit, Finding, TensorCheck, TensorInfo, Window
from keras_gradwatch.rules import (
    DEFAULT_RULES,
    Disconnected,
    Exploding,
    Imprecise,
    Mismatch,
    NonFinite,
    Vanishing,
    ZeroGradient,
)
from keras_gradwatch.signals import improvement, kernels, starts_the_run


def network(num_layers: int = 6, **fields: object) -> tuple[TensorInfo, ...]:
    """Dense layers ``d0`` … with a kernel of 8 × 8 and a bias each; ``d0`` is nearest the input."""
    fields = {"layer_class": "Dense", "activation": "relu", "initializer": "GlorotUniform"} | fields
    return tuple(
        TensorInfo(layer=f"d{k}", tensor=f"d{k}/{part}", role="weight", depth=k, shape=shape, **fields)
        for k in range(num_layers)
        for part, shape in (("kernel", (8, 8)), ("bias", (8,)))
    )


def healthy(
    tensors: tuple[TensorInfo, ...] | None = None, *, num_steps: int = 60, first_step: int = 1, seed: int = 0
) -> Window:
    """A run whose loss halves every 20 steps, with noisy gradients of norm 0.1 and updates of 1e-3 of the weights."""
    tensors = network() if tensors is None else tensors
    generator = np.random.default_rng(seed)
    noise = generator.lognormal(0.0, 0.3, (num_steps, len(tensors)))
    size = np.array([info.size for info in tensors], dtype=float)
    norm = 0.1 * noise
    columns = {
        "grad_norm": norm,
        "grad_rms": norm / np.sqrt(size),
        "grad_absmax": 3 * norm / np.sqrt(size),
        "zero_fraction": np.zeros_like(norm),
        "nonfinite_count": np.zeros_like(norm),
        "weight_norm": np.full_like(norm, 2.0),
        "update_ratio": 1e-3 * noise,
    }
    steps = np.arange(first_step, first_step + num_steps)
    return Window(
        tensors=tensors,
        steps=steps,
        epochs=np.zeros(num_steps, dtype=np.int64),
        losses=0.5 ** (steps / 20) * generator.lognormal(0.0, 0.05, num_steps),
        loss_known=np.ones(num_steps, dtype=bool),
        learning_rates=np.full(num_steps, 0.01),
        statistics=np.stack([columns[name] for name in STATISTICS], axis=-1),
        connected=np.ones((num_steps, len(tensors)), dtype=bool),
    )


def with_columns(window: Window, **columns: np.ndarray) -> Window:
    """The window with some statistics, broadcast to ``[S, V]``, put in place of its own."""
    statistics = window.statistics.copy()
    for name, values in columns.items():
        statistics[:, :, STATISTICS.index(name)] = values
    return replace(window, statistics=statistics)


def scaled(window: Window, gradient: np.ndarray, *, update: np.ndarray | float = 1.0) -> Window:
    """The window with gradients and update ratios multiplied."""
    names = ("grad_norm", "grad_rms", "grad_absmax")
    columns = {name: window.column(name) * gradient for name in names}
    return with_columns(window, **columns, update_ratio=window.column("update_ratio") * update)


def check(tensors: tuple[TensorInfo, ...], verdicts: dict[str, str], **fields: object) -> CheckResult:
    """A check with the verdicts given; all other tensors are right."""
    rows = tuple(TensorCheck(tensor=info.tensor, verdict=verdicts.get(info.tensor, "ok")) for info in tensors)
    return CheckResult(tensors=tensors, checks=rows, **fields)


def ask_all(window: Window) -> list[Finding]:
    return [finding for rule in DEFAULT_RULES for finding in rule(window)]


def flat_loss(window: Window, level: float = 2.3) -> Window:
    return replace(window, losses=level * np.random.default_rng(1).lognormal(0.0, 0.01, window.losses.size))


def fading(num_layers: int = 9, **fields: object) -> Window:
    """A stuck sigmoid stack: gradients fall tenfold per layer towards the input, plain SGD."""
    window = healthy(network(num_layers, activation="sigmoid", **fields))
    fade = 10.0 ** -np.array([num_layers - 1 - info.depth for info in window.tensors], dtype=float)
    return flat_loss(scaled(window, fade, update=fade))


# ---------------------------------------------------------------- healthy windows and edges


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("num_steps", "first_step"), [(1, 1), (7, 1), (60, 1), (200, 1), (200, 801)])
def test_healthy_runs_are_quiet(num_steps: int, first_step: int, seed: int) -> None:
    """No rule says anything about a healthy window of any length."""
    assert ask_all(healthy(num_steps=num_steps, first_step=first_step, seed=seed)) == []


@pytest.mark.parametrize("num_layers", [1, 2])
def test_small_models_are_quiet(num_layers: int) -> None:
    """One or two layers are enough for every rule to look at."""
    assert ask_all(healthy(network(num_layers))) == []


@pytest.mark.parametrize(
    "window",
    [
        healthy(num_steps=0),
        healthy((), num_steps=5),
        with_columns(healthy(), **dict.fromkeys(STATISTICS, np.nan)),
        replace(healthy(), loss_known=np.zeros(60, dtype=bool), losses=np.full(60, np.nan)),
        healthy((TensorInfo(layer="scale", tensor="scale/gain", role="weight", depth=0, shape=()),)),
    ],
    ids=["no steps", "no weights", "untracked", "loss unknown", "one scalar"],
)
def test_windows_without_evidence_are_quiet(window: Window) -> None:
    """Nothing measured means nothing to report, and no warning from NumPy."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ask_all(window) == []


def test_scale_of_the_loss_does_not_matter() -> None:
    """A loss and gradients multiplied by 1e6 or 1e-6, as an adaptive optimizer takes in its stride, change nothing."""
    window = healthy(num_steps=200)
    for factor in (1e6, 1e-6):
        assert ask_all(replace(scaled(window, np.float64(factor)), losses=window.losses * factor)) == []


def test_rules_are_fast() -> None:
    """All rules together take less than 20 ms on 200 steps of 60 tensors, ten times what they need when left alone."""
    window = healthy(network(30), num_steps=200)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        ask_all(window)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.02


# ---------------------------------------------------------------- mismatch


def mismatched(factor: float = 1.1, culprits: Sequence[Culprit] | None = None, **fields: object) -> Window:
    tensors = network(4)
    if culprits is None:
        culprits = [Culprit(layer="scale", layer_class="Scale", parts=("input",), factor=factor, error=0.091, bar=3e-7)]
    wrong = dict.fromkeys(["d0/kernel", "d0/bias", "d1/kernel"], "mismatch")
    return replace(healthy(tensors), check=check(tensors, wrong, culprits=tuple(culprits), **fields), check_step=12)


def test_mismatch_names_the_culprit_and_both_sides() -> None:
    """The layer to blame, how wrong it is, what it spoils and what is right after it."""
    (finding,) = Mismatch()(mismatched())
    assert (finding.layer, finding.first_step, finding.last_step, finding.severity) == ("scale", 12, 12, "error")
    assert finding.message == (
        "scale (Scale): its backward gives 1.10 × the true slope w.r.t. its input (error 9.1e-02, bar 3e-07); "
        "wrong upstream: d0/kernel, d0/bias, d1/kernel; right downstream: d2, d3"
    )
    assert 'check_layer(model.get_layer("scale"), x)' in finding.advice
    assert finding.tensors == ("d0/kernel", "d0/bias", "d1/kernel")


def test_mismatch_hints_at_gradient_reversal() -> None:
    """A negative factor may be meant: the advice says how to declare it."""
    (finding,) = Mismatch()(mismatched(factor=-0.5))
    assert 'surrogates=("scale",)' in finding.advice


def test_mismatch_without_a_culprit_is_one_finding() -> None:
    """When no layer could be blamed, the wrong tensor nearest the loss stands for all."""
    (finding,) = Mismatch()(mismatched(culprits=()))
    assert (finding.layer, finding.tensor) == ("d1", "d1/kernel")
    assert "no single layer could be blamed" in finding.message


def test_mismatch_of_the_loss_and_of_nested_layers() -> None:
    """The advice fits what is to blame: a loss, or a layer inside a layer."""
    culprits = [Culprit(layer="loss", error=0.5, bar=1e-6), Culprit(layer="encoder/scale", error=0.5, bar=1e-6)]
    loss, nested = Mismatch()(mismatched(culprits=culprits))
    assert "compute_gradient_error" in loss.advice
    assert 'model.get_layer("encoder").get_layer("scale")' in nested.advice


def test_mismatch_of_a_check_that_slept_counts_for_nothing() -> None:
    """A check whose negative control failed proves nothing."""
    assert Mismatch()(mismatched(awake=False)) == ()


# ---------------------------------------------------------------- imprecise


def test_imprecise_tensors_are_one_finding() -> None:
    """One cause, one finding, on the first layer, with the check's reason."""
    tensors = network(3)
    rows = [TensorCheck(tensor=info.tensor, verdict="ok") for info in tensors]
    for i in (2, 4):
        rows[i] = replace(rows[i], verdict="imprecise", rounding_error=0.1 * i, reason="underflow in float16")
    window = replace(healthy(tensors), check=CheckResult(tensors=tensors, checks=tuple(rows)), check_step=1)
    (finding,) = Imprecise()(window)
    assert (finding.layer, finding.tensors, finding.value) == ("d1", ("d1/kernel", "d2/kernel"), pytest.approx(0.4))
    assert "underflow in float16" in finding.message


# ---------------------------------------------------------------- nonfinite


def broken(window: Window, step: int, rows: Sequence[int] | slice = slice(None), *, loss: float = math.nan) -> Window:
    """The window in which these tensors' gradients are NaN at one step (an index), and everything after it."""
    statistics, losses = window.statistics.copy(), window.losses.copy()
    statistics[step, rows, :3] = np.nan
    statistics[step, rows, STATISTICS.index("nonfinite_count")] = 64
    statistics[step, rows, STATISTICS.index("update_ratio")] = np.nan
    statistics[step + 1 :] = np.nan
    statistics[step + 1 :, :, STATISTICS.index("nonfinite_count")] = 64
    losses[step], losses[step + 1 :] = loss, np.nan
    return replace(window, losses=losses, statistics=statistics)


def test_nan_loss_is_found_at_its_step() -> None:
    """The first bad step counts, and without better knowledge the loss is named."""
    (finding,) = NonFinite()(broken(healthy(), 30))
    assert (finding.layer, finding.first_step, finding.last_step, finding.severity) == ("loss", 31, 60, "error")


def test_nan_gradient_with_finite_loss_points_behind_the_deepest_hit_layer() -> None:
    """If d0 and d1 are hit and d2 is not, the fault lies just after d1."""
    (finding,) = NonFinite()(broken(healthy(), 30, range(4), loss=0.5))
    assert finding.layer == "d1"
    assert "just after d1" in finding.message
    assert finding.tensors == ("d0/kernel", "d0/bias", "d1/kernel", "d1/bias")


@pytest.mark.parametrize(
    ("culprit", "advice"),
    [
        (Culprit(layer="labels", kind="forward", detail="the targets hold NaN in row 3"), "clean the labels"),
        (Culprit(layer="log", layer_class="Log", kind="backward"), "add an epsilon"),
        (Culprit(layer="log", layer_class="Log", kind="forward"), "in range"),
    ],
)
def test_nonfinite_names_the_culprit(culprit: Culprit, advice: str) -> None:
    """What produced the first NaN is known: it is named, and the advice fits."""
    (finding,) = NonFinite()(replace(broken(healthy(), 30), culprits=(culprit,)))
    assert finding.layer == culprit.layer
    assert culprit.detail in finding.message
    assert advice in finding.advice


def test_nonfinite_weight_with_finite_loss_is_found() -> None:
    """NaN weights may hide behind a finite loss."""
    window = healthy()
    norms = window.column("weight_norm").copy()
    norms[40:, 2] = np.nan
    (finding,) = NonFinite()(with_columns(window, weight_norm=norms))
    assert (finding.layer, finding.tensor, finding.first_step) == ("d1", "d1/kernel", 41)


def test_check_that_meets_nan_is_a_finding() -> None:
    """The probe may be non-finite although the tracked steps are not; only its non-finite culprits count."""
    tensors = network(2)
    culprits = (Culprit(layer="sqrt", kind="backward"), Culprit(layer="scale", error=0.1, bar=1e-8))
    result = check(tensors, {"d0/kernel": "nonfinite"}, culprits=culprits)
    (finding,) = NonFinite()(replace(healthy(tensors), check=result, check_step=5))
    assert (finding.layer, finding.first_step) == ("sqrt", 5)
    (blind,) = NonFinite()(replace(healthy(tensors), check=replace(result, culprits=()), check_step=5))
    assert "just after d0" in blind.message


def skipping(steps: slice) -> Window:
    """Steps that loss scaling skipped: non-finite gradients, no update, finite loss."""
    window = healthy()
    count, update = window.column("nonfinite_count").copy(), window.column("update_ratio").copy()
    count[steps], update[steps] = 64, 0.0
    return with_columns(window, nonfinite_count=count, update_ratio=update)


def test_a_few_skipped_steps_of_loss_scaling_are_normal() -> None:
    """The search for the scale skips steps in a row; that is its work."""
    assert NonFinite()(skipping(slice(0, 8))) == ()


def test_endless_skipping_of_loss_scaling_is_found() -> None:
    """If it goes on, the weights never move."""
    (finding,) = NonFinite()(skipping(slice(5, None)))
    assert (finding.layer, finding.first_step) == ("d5", 6)
    assert "keeps skipping" in finding.message


# ---------------------------------------------------------------- disconnected


def cut(rows: slice, **fields: object) -> Window:
    window = healthy()
    linked, statistics = window.connected.copy(), window.statistics.copy()
    linked[:, rows], statistics[:, rows] = False, np.nan
    return replace(window, connected=linked, statistics=statistics, **fields)


def test_cut_trunk_is_one_warning() -> None:
    """Everything before a cut is one finding, on the last layer before it."""
    (finding,) = ask_all(cut(slice(0, 4)))
    assert (finding.finding, finding.layer, finding.severity) == ("disconnected", "d1", "warning")
    assert "between d1 and d2" in finding.message
    assert finding.tensors == ("d0/kernel", "d0/bias", "d1/kernel", "d1/bias")


def test_cutting_layer_is_named_when_the_check_knows_it() -> None:
    """The check's culprit is the layer, not its victims."""
    culprit = Culprit(layer="round", layer_class="Round", kind="cut", parts=("d0/kernel",), detail="cut by Round")
    result = check(network(), {"d0/kernel": "disconnected", "d0/bias": "disconnected"}, culprits=(culprit,))
    (finding,) = Disconnected()(cut(slice(0, 2), check=result, check_step=1))
    assert (finding.layer, finding.severity) == ("round", "warning")
    assert "round (Round): cut by Round" in finding.message


def test_unused_part_behind_learning_weights_is_only_told() -> None:
    """A pooler that nothing uses does no harm."""
    result = check(network(), {"d4/kernel": "disconnected"})
    rows = tuple(replace(r, reason="the loss does not depend on it") if r.verdict != "ok" else r for r in result.checks)
    (finding,) = Disconnected()(cut(slice(8, 10), check=replace(result, checks=rows), check_step=1))
    assert (finding.layer, finding.severity) == ("d4", "info")


def test_blocks_are_separate_findings_and_one_gradient_clears() -> None:
    """Two blocks are two causes; a weight that had a gradient at some step is connected."""
    window = cut(slice(0, 2))
    linked = window.connected.copy()
    linked[:, 6:8] = False
    assert [f.layer for f in Disconnected()(replace(window, connected=linked))] == ["d0", "d3"]
    linked[3, 6:8] = True
    assert [f.layer for f in Disconnected()(replace(window, connected=linked))] == ["d0"]


# ---------------------------------------------------------------- zero gradient


def zeroed(rows: Sequence[int], *, since: int = 0, window: Window | None = None) -> Window:
    """The window in which these tensors have an exactly zero gradient from a step (an index) on."""
    window = healthy() if window is None else window
    factor = np.ones(window.statistics.shape[:2])
    factor[since:, list(rows)] = 0.0
    return scaled(window, factor)


def test_blocked_trunk_is_found() -> None:
    """Kernels and biases of the first layers get nothing: the block is at or just after the last of them."""
    (finding,) = ask_all(zeroed(range(4)))
    assert (finding.finding, finding.layer, finding.first_step) == ("zero_gradient", "d1", 1)
    assert finding.tensors == ("d0/kernel", "d0/bias", "d1/kernel", "d1/bias")


def test_dead_layer_before_a_live_bias_is_named() -> None:
    """A kernel without gradient beside a live bias has zero input: the layer before it is dead."""
    (finding,) = ZeroGradient()(zeroed([0, 1, 2, 3, 4]))
    assert finding.layer == "d1"
    assert "everything that d1 sends to d2 is zero" in finding.message
    assert "relu" in finding.advice


def test_block_inside_a_normalisation_is_named() -> None:
    """Batch normalisation of one sample: its scale gets nothing, its offset does."""
    tensors = list(network(3))
    tensors[2:4] = [
        replace(info, layer="bn", tensor=f"bn/{part}", shape=(8,), layer_class="BatchNormalization", activation="")
        for info, part in zip(tensors[2:4], ("gamma", "beta"), strict=True)
    ]
    (finding,) = ZeroGradient()(zeroed([0, 1, 2], window=healthy(tuple(tensors))))
    assert finding.layer == "bn"


def test_zero_biases_and_half_zero_layers_are_quiet() -> None:
    """A bias before batch normalisation is zero by mathematics; so is a recurrent kernel over one time step."""
    assert ask_all(zeroed([1, 3, 7])) == []
    tensors = list(network(3))
    tensors[1] = replace(tensors[1], tensor="d0/recurrent_kernel", shape=(8, 8))
    assert ask_all(zeroed([1], window=healthy(tuple(tensors)))) == []


def test_short_zero_stretches_are_quiet_unless_the_check_agrees() -> None:
    """Ten zero steps may be chance; five are enough when the check says the slope is zero."""
    assert ZeroGradient()(zeroed(range(4), since=50)) == []
    window = zeroed(range(4), window=healthy(num_steps=5))
    agreed = check(window.tensors, {info.tensor: "zero" for info in window.tensors[:4]})
    assert [f.layer for f in ZeroGradient()(replace(window, check=agreed, check_step=1))] == ["d1"]


def test_zero_up_to_noise_counts_when_the_check_says_zero() -> None:
    """Rounding leaves 1e-9 of the largest gradient where the true one is zero."""
    window = scaled(healthy(), np.where(np.arange(12) < 4, 1e-9, 1.0))
    agreed = check(window.tensors, {info.tensor: "zero" for info in window.tensors[:4]})
    assert [f.layer for f in ZeroGradient()(replace(window, check=agreed, check_step=1))] == ["d1"]


@pytest.mark.parametrize("gradient", [0.0, 1e-9], ids=["exact", "noise"])
def test_model_that_gets_nothing_from_the_start_is_an_error(gradient: float) -> None:
    """Softmax over one unit: no weight gets a gradient though there is a loss."""
    (finding,) = ask_all(flat_loss(scaled(healthy(), np.float64(gradient))))
    assert (finding.finding, finding.layer, finding.severity) == ("zero_gradient", "d5", "error")
    assert "although the loss is 2.3" in finding.message


def test_model_that_dies_later_is_found() -> None:
    """All gradients become zero while the loss still varies from batch to batch."""
    (finding,) = ZeroGradient()(zeroed(range(12), since=20, window=flat_loss(healthy())))
    assert (finding.layer, finding.first_step) == ("d5", 21)


@pytest.mark.parametrize("end", ["zero", "clipped"])
def test_finished_model_is_quiet(end: str) -> None:
    """A hinge loss that reached zero, or a cross-entropy at its clipping constant, is success."""
    window = zeroed(range(12), since=20)
    losses = window.losses.copy()
    losses[20:] = 0.0 if end == "zero" else 1.19e-7
    assert ask_all(replace(window, losses=losses)) == []


def test_batches_of_weight_zero_are_quiet() -> None:
    """With all sample weights zero the loss is zero, and so is the gradient, as asked."""
    window = zeroed(range(12))
    assert ask_all(replace(window, losses=np.zeros_like(window.losses))) == []


# ---------------------------------------------------------------- vanishing


def test_fading_gradients_are_found() -> None:
    """Eight decades from the loss to the input, a stuck loss: the first layer is named, with numbers and origin."""
    (finding,) = ask_all(fading())
    assert (finding.finding, finding.layer, finding.tensor) == ("vanishing", "d0", "d0/kernel")
    assert finding.value == pytest.approx(-8.0, abs=0.3)  # 30 % of noise from step to step
    assert "from d8 to d0" in finding.message
    assert "(sigmoid, glorot_uniform)" in finding.message
    assert "-12 of its size" in finding.message or "1e-11 of its size" in finding.message
    assert finding.advice.startswith("relu or gelu")
    assert "d6/kernel" in finding.tensors
    assert "d8/kernel" not in finding.tensors


def test_fading_is_found_under_adam_too() -> None:
    """Adam gives every layer the same update; a loss that does not follow gives it away."""
    window = fading()
    (finding,) = Vanishing()(with_columns(window, update_ratio=1e-3))
    assert finding.layer == "d0"


def test_fading_that_trains_is_healthy() -> None:
    """A trunk whose gradient is scaled by 1e-4 on purpose learns under Adam, and the loss falls."""
    window = scaled(healthy(), np.where(np.arange(12) < 6, 1e-4, 1.0))
    assert ask_all(window) == []


def test_converged_model_is_quiet() -> None:
    """All gradients fall together: that is success."""
    window = healthy(num_steps=200)
    fall = 10.0 ** -np.linspace(0, 8, 200)[:, None]
    assert ask_all(replace(scaled(window, fall, update=fall), losses=window.losses * fall[:, 0])) == []


def test_large_vocabulary_is_not_vanishing() -> None:
    """An embedding's rms counts the rows in use only."""
    tensors = list(network(6))
    tensors[0] = replace(tensors[0], shape=(10**6, 8), layer_class="Embedding")
    window = flat_loss(healthy(tuple(tensors), num_steps=200))
    fraction = window.column("zero_fraction").copy()
    fraction[:, 0] = 1 - 1e-5
    assert ask_all(with_columns(window, zero_fraction=fraction)) == []


def test_uneven_but_strong_layers_are_quiet() -> None:
    """A ratio of 1e-3 in a model whose first layer still matters and whose loss falls is no fault."""
    assert Vanishing()(scaled(healthy(), np.where(np.arange(12) < 4, 1e-3, 1.0))) == ()


def test_advice_follows_the_initialiser() -> None:
    """A linear stack fades because its weights are too small."""
    window = fading()
    tensors = tuple(replace(info, activation="linear", initializer="RandomNormal") for info in window.tensors)
    (finding,) = Vanishing()(replace(window, tensors=tensors))
    assert "initialiser" in finding.advice


# ---------------------------------------------------------------- exploding


def growing(per_step: float, *, update: float = 0.5) -> Window:
    """Loss and gradients grow by a factor per step, updates are large."""
    window = healthy()
    growth = per_step ** np.arange(60)
    grown = scaled(window, growth[:, None])
    return with_columns(replace(grown, losses=growth), update_ratio=update)


def test_updates_larger_than_the_weights_are_found() -> None:
    """A learning rate above the stability limit replaces the weights at every step."""
    (finding,) = ask_all(growing(1.1, update=2.0))
    assert (finding.finding, finding.first_step, finding.severity) == ("exploding", 1, "error")
    assert "one update is 2 × the size of the weights" in finding.message
    assert "learning rate well below 0.01" in finding.advice


def test_growing_loss_is_found() -> None:
    """A loss that grew tenfold with fast weights."""
    (finding,) = Exploding()(growing(1.08))
    assert "the loss grew" in finding.message
    assert finding.first_step > 20


def test_gradient_that_outgrows_its_past_is_found_and_localised() -> None:
    """One layer's gradient grows ten-thousandfold: it is the one named."""
    factor = np.ones((60, 12))
    factor[50:, 6] = 1e5
    (finding,) = Exploding()(scaled(healthy(), factor))
    assert (finding.layer, finding.tensor, finding.first_step) == ("d3", "d3/kernel", 51)
    assert "its own past" in finding.message


def test_blowout_before_nan_is_found() -> None:
    """One finite step is enough when its update is a thousand times the weights."""
    window = scaled(healthy(), np.float64(1e8))
    ratio = window.column("update_ratio").copy()
    ratio[0] = 1e4
    found = ask_all(broken(with_columns(window, update_ratio=ratio), 1))
    assert [(f.finding, f.first_step) for f in found] == [("nonfinite", 2), ("exploding", 1)]


def test_explosion_hidden_by_clipping_is_found() -> None:
    """Raw norms of 1e11 clipped to nothing: training stands still."""
    window = flat_loss(scaled(healthy(), np.float64(1e12), update=1e-3), level=1e12)
    (finding,) = Exploding()(window)
    assert "hidden by clipping" in finding.message


def test_gradients_growing_towards_the_input_are_found() -> None:
    """Four decades from the loss to the input while the loss is flat."""
    growth = np.repeat(10.0 ** np.arange(6)[::-1], 2)
    (finding,) = Exploding()(flat_loss(scaled(healthy(), growth)))
    assert "towards" in finding.message or "to the first ones" in finding.message
    assert finding.layer == "d0"


@pytest.mark.parametrize("named", [True, False])
def test_overflow_in_the_forward_pass_is_found(named: bool) -> None:
    """Stacked exponentials overflow at once; so does any layer with a kernel that makes Inf out of finite values."""
    tensors = network(4, activation="relu" if named else "exponential")
    culprits = (Culprit(layer="d2", kind="forward"),) if named else ()
    window = replace(broken(healthy(tensors), 0), culprits=culprits)
    (finding,) = Exploding()(window)
    assert finding.layer == ("d2" if named else "d3")
    assert "overflow" in finding.message


def test_nan_from_elsewhere_is_no_explosion() -> None:
    """A log layer, bad labels or a weight broken before are not overflow."""
    window = broken(healthy(), 0)
    broken_weight = Culprit(layer="d2", kind="forward", parts=("d2/kernel",))
    for culprit in (Culprit(layer="log", kind="forward"), Culprit(layer="labels", kind="forward"), broken_weight):
        assert Exploding()(replace(window, culprits=(culprit,))) == ()


def test_spikes_and_large_first_steps_are_quiet() -> None:
    """Two spiky batches, and Adam's first step with a learning rate of 1, are no explosion."""
    factor = np.ones((60, 1))
    factor[[20, 40]] = 1e4
    assert ask_all(scaled(healthy(), factor)) == []
    window = healthy()
    ratio = window.column("update_ratio").copy()
    ratio[:2] = 5.0
    assert ask_all(with_columns(window, update_ratio=ratio)) == []


def test_negative_losses_that_fall_are_quiet() -> None:
    """A log-likelihood that goes from −0.1 to −30 improves, although its size grows."""
    window = with_columns(healthy(), update_ratio=0.05)
    assert ask_all(replace(window, losses=-np.geomspace(0.1, 30, 60))) == []


# ---------------------------------------------------------------- signals


def test_improvement_is_the_share_of_the_loss_that_is_gone() -> None:
    """Exact for constants, NaN when unknown, signed for growth and for negative losses."""
    assert improvement(np.array([4.0] * 10 + [1.0] * 10)) == 0.75
    assert improvement(np.array([1.0] * 10 + [3.0] * 10)) == -2.0
    assert improvement(np.array([-1.0] * 10 + [-3.0] * 10)) == 2.0
    assert math.isnan(improvement(np.full(5, np.nan)))


def test_starts_the_run_knows_sampled_runs() -> None:
    """Every tenth step counts from step 1 or 10; a resumed or late window does not start the run."""
    window = healthy()
    assert starts_the_run(window)
    assert starts_the_run(replace(window, steps=window.steps * 10))
    assert not starts_the_run(replace(window, steps=window.steps + 100))


def test_kernels_are_connected_and_have_two_dimensions() -> None:
    """Biases and disconnected weights are not compared across depth."""
    assert kernels(cut(slice(0, 2))).tolist() == [2, 4, 6, 8, 10]
