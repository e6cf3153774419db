import warnings
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from keras_gradwatch import plots  # noqa: E402
from keras_gradwatch.account import account_of, worst_checks  # noqa: E402
from keras_gradwatch.history import History  # noqa: E402
from keras_gradwatch.pictures import decade, log_range, name_of  # noqa: E402
from keras_gradwatch.records import Finding  # noqa: E402
from keras_gradwatch.samples import binned_averages, binned_extremes, binned_means, bins, medians, samples_of  # noqa: E402

PLOTS = [getattr(plots, name) for name in plots.__all__ if name != "overview"]
VANISHING = Finding(
    finding="vanishing", layer="dense_0", first_step=1, last_step=20, message="fades",
    tensors=("model/dense_0/kernel", "model/dense_1/kernel"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def close_figures():
    yield
    from matplotlib import pyplot

    pyplot.close("all")


def texts(axes) -> str:
    return " ".join(text.get_text() for text in [*axes.texts, *axes.get_yticklabels(), axes.title])


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.__name__)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"layers": 1, "steps": 1},
        {"layers": 150, "steps": 30, "wrong": 7},
        {"broken_at": 5},
        {"broken_at": 1},
        {"checks": False, "findings": (VANISHING,)},
        {"names": "_$x^2$<b>\n{}".format},
    ],
    ids=["usual", "tiny", "300 tensors", "breaks", "broken from the start", "finding", "hostile names"],
)
def test_every_plot_draws_every_run(plot, settings, make_run: Callable[..., pd.DataFrame]) -> None:
    """Each plot returns axes that can be drawn without a warning, for 2 and 300 tensors, NaN and strange names."""
    axes = plot(make_run(**settings))
    axes.figure.draw_without_rendering()
    assert axes.title.get_text() or axes.get_title("left")


@pytest.mark.parametrize("plot", [*PLOTS, plots.overview], ids=lambda plot: plot.__name__)
def test_an_empty_history_says_so(plot) -> None:
    """A run without a step gives a picture that says why it is empty."""
    figure = plot(History((), {}).to_frame()).figure
    figure.draw_without_rendering()
    assert any("no " in text.get_text() for axes in figure.axes for text in axes.texts)


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.__name__)
def test_axes_given_are_used(plot, make_run) -> None:
    """A plot draws where it is told to."""
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    assert plot(make_run(), ax=axes) is axes


def test_another_table_is_refused() -> None:
    """A frame that is no history is answered with what to pass instead."""
    with pytest.raises(ValueError, match=r"without the columns step.*Pass watch\.history"):
        plots.norms(pd.DataFrame({"a": [1]}))


def test_an_unknown_quantity_is_refused(make_run) -> None:
    """The error lists the quantities there are."""
    with pytest.raises(ValueError, match="'rms', 'norm', 'update_ratio', 'zero_fraction'"):
        plots.heat_map(make_run(), quantity="size")


def test_layers_stand_in_network_order_with_the_input_on_top(make_run) -> None:
    """The first layer has row 0, and rows count downwards."""
    axes = plots.gradient_flow(make_run())
    assert [label.get_text() for label in axes.get_yticklabels()] == ["dense_0", "dense_1", "dense_2"]
    low, high = axes.get_ylim()
    assert low > high


def test_the_flow_is_that_of_the_run(make_run) -> None:
    """The median line falls by a factor of ten per layer, as the gradients were made."""
    line = plots.gradient_flow(make_run()).get_lines()[0]
    norm = np.hypot(4, 4)  # kernel and bias of norm 4 each, of 20 elements together
    assert line.get_xdata() == pytest.approx(np.array([1e-2, 1e-1, 1]) * norm / np.sqrt(20), rel=0.1)


def test_the_heat_map_frames_and_names_a_finding(make_run) -> None:
    """The layers of a finding have a frame over its steps and its name at the side."""
    axes = plots.heat_map(make_run(findings=(VANISHING,)))
    assert "vanishing" in texts(axes)
    assert [patch.get_height() for patch in axes.patches] == [2, 2]  # a dark and a light frame around two layers


def test_a_fault_outside_of_the_layers_is_named(make_run) -> None:
    """A finding about the data says so at the side of what it spoils."""
    finding = Finding(
        finding="nonfinite", layer="data", first_step=5, last_step=20, message="", tensors=("model/dense_1/bias",)
    )
    assert "nonfinite (data)" in texts(plots.heat_map(make_run(broken_at=5, findings=(finding,))))


def test_nan_is_shown_as_such(make_run) -> None:
    """Steps with NaN have their own colour and marks, with a legend."""
    frame = make_run(broken_at=5)
    for plot in (plots.heat_map, plots.norms, plots.losses):
        assert "NaN or Inf" in [text.get_text() for text in plot(frame).get_legend().get_texts()]


def test_a_wrong_tensor_is_named_among_three_hundred(make_run) -> None:
    """However few names fit, that of the wrong tensor is there, and its mark lies beyond its bar."""
    axes = plots.check_errors(make_run(layers=150, wrong=8))
    assert "dense_3/bias" in [label.get_text() for label in axes.get_yticklabels()]
    assert len(axes.get_yticklabels()) < 60
    wrong = next(marks for marks in axes.collections if marks.get_label() == "mismatch (1)")
    assert wrong.get_offsets().tolist() == [[0.1, 8]]


def test_the_fault_is_named_beside_what_it_spoils(make_run) -> None:
    """The layer at fault stands at its own weight, or after what it spoils if it has none, not at it."""
    spoiled = {"first_step": 1, "last_step": 20, "message": "", "tensors": ("model/dense_0/kernel",)}
    for layer, row in (("dense_2", 5), ("reversal", 1.5)):
        finding = Finding(finding="mismatch", layer=layer, **spoiled)
        axes = plots.check_errors(make_run(wrong=1, findings=(finding,)))
        places = {text.get_text(): text.get_position()[1] for text in axes.texts}
        assert places == {f"◂ fault in {layer}": row}
    assert list(plots.check_errors(make_run()).texts) == []


def test_few_layers_all_have_a_colour_and_many_share_a_range(make_run) -> None:
    """Six layers are six named lines; of 40 the weakest and the strongest are named, the others counted."""
    few, many = (plots.norms(make_run(layers=count)) for count in (6, 40))
    assert [text.get_text() for text in few.get_legend().get_texts()] == [
        *(f"dense_{i}" for i in range(6)),
        "all together",
    ]
    assert "38 other layers" in [text.get_text() for text in many.get_legend().get_texts()]


def test_the_overview_has_the_verdict_on_top(make_run) -> None:
    """One figure with all pictures, titled with what was found."""
    figure = plots.overview(make_run(findings=(VANISHING,)))
    assert figure.get_suptitle() == "model, 20 steps\n! vanishing: dense_0, since step 1"
    assert len([axes for axes in figure.axes if axes.get_title("left")]) == 6


def test_samples_agree_with_pandas(make_run) -> None:
    """Norms by layer are those that a group-by gives, also with steps that were not tracked and a broken one."""
    frame = make_run(layers=4, steps=30)
    frame.loc[frame["step"] == 7, ["grad_norm", "grad_rms"]] = np.nan
    weights = frame[frame["role"] == "weight"]
    squares = weights.assign(square=weights["grad_norm"] ** 2).groupby(["step", "layer"], observed=True)["square"]
    expected = np.sqrt(squares.sum(min_count=1)).unstack()
    samples = samples_of(frame)
    assert samples.layers == tuple(f"dense_{i}" for i in range(4))
    np.testing.assert_allclose(samples.norms, expected.to_numpy(), rtol=1e-12)
    np.testing.assert_allclose(samples.rms, expected.to_numpy() / np.sqrt(20), rtol=1e-12)
    np.testing.assert_allclose(samples.update_ratios, 1e-3)
    np.testing.assert_allclose(samples.zero_fractions[0], 0.25)
    assert not samples.tracked[6]
    assert samples.tracked.sum() == 29


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_norms_of_layers_do_not_leave_the_range(scale: float, make_run) -> None:
    """Squares that overflow or vanish do not make a norm infinite or zero."""
    frame = make_run(layers=1, steps=1)
    frame["grad_norm"] = np.where(frame["tensor"] == "image", np.nan, 3 * scale)
    samples = samples_of(frame)
    assert samples.norms[0, 0] == pytest.approx(3 * np.sqrt(2) * scale)
    assert samples.global_norms[0] == pytest.approx(3 * np.sqrt(2) * scale)


def test_a_sparse_giant_is_refused(make_run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that would need a huge table are answered before memory is gone."""
    monkeypatch.setattr("keras_gradwatch.samples.MOST_CELLS", 10)
    with pytest.raises(ValueError, match="20 steps and 6 weights"):
        samples_of(make_run())


def test_rows_without_a_layer_are_refused(make_run) -> None:
    """A missing name is not taken for the last layer."""
    frame = make_run()
    frame["layer"] = frame["layer"].astype(object).where(frame["step"] != 3)
    with pytest.raises(ValueError, match="without a layer"):
        samples_of(frame)


def test_bins_and_averages() -> None:
    """Bins cover all steps; means are geometric or arithmetic over what was measured, extremes the largest."""
    values = np.array([[1.0], [100.0], [np.nan], [np.nan], [0.0], [0.0], [0.0], [4.0]])
    starts = bins(8, 4)
    assert starts.tolist() == [0, 2, 4, 6]
    np.testing.assert_allclose(binned_means(values, starts)[:, 0], [10, np.nan, 0, 4])
    np.testing.assert_allclose(binned_averages(values, starts)[:, 0], [50.5, np.nan, 0, 2])
    np.testing.assert_allclose(binned_extremes(values, starts)[:, 0], [100, np.nan, 0, 4])
    assert bins(3, 400).tolist() == [0, 1, 2]


def test_medians_are_those_of_numpy() -> None:
    """The quick median agrees with numpy's for odd, even and empty columns."""
    values = np.array([[3.0, 1.0, np.nan], [1.0, np.nan, np.nan], [np.nan, np.nan, np.nan], [7.0, 5.0, np.nan]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        expected = np.nanmedian(values, axis=0)
    np.testing.assert_array_equal(medians(values), expected)


def test_names_are_safe_for_matplotlib() -> None:
    """No name is taken for mathematics, breaks a line or hides from a legend."""
    assert name_of("a$b$") == r"a\$b\$"
    assert name_of("a\nb") == r"a\nb"
    assert name_of("_hidden") == " _hidden"
    assert len(name_of("x" * 500)) < 40


def test_limits_of_log_axes() -> None:
    """Zero and NaN have no part in them, one value gets a decade around it, and twenty decades are the most."""
    assert log_range(np.array([0.0, np.nan, np.inf])) == (0.1, 10.0)
    low, high = log_range(np.array([1.0]))
    assert low < 1 < high
    assert high / low == pytest.approx(10)
    assert log_range(np.array([1e-300, 1.0]))[0] > 1e-22


@pytest.mark.parametrize(("value", "text"), [(1.0, "1"), (10.0, "10"), (1e-12, "10⁻¹²"), (0.0, "1")])
def test_decades_are_plain_text(value: float, text: str) -> None:
    """Tick labels need no mathematics."""
    assert decade(value) == text


def test_an_account_survives_its_frame(make_run) -> None:
    """Tensors, checks and findings come back from the frame as they went in."""
    account = account_of(make_run(wrong=2, findings=(VANISHING,)))
    assert [tensor.tensor for tensor in account.tensors][:3] == ["image", "model/dense_0/kernel", "model/dense_0/bias"]
    assert account.findings == (VANISHING,)
    assert account.check_steps == (1, 11)
    assert [check.verdict for _, check in worst_checks(account)][:4] == ["ok", "ok", "mismatch", "ok"]
    assert account.steps == 20
    assert "mismatch" not in account.summary().splitlines()[1]
    assert account.certainty()[0].startswith("✓ 5 of 6 weights and the input are right")


def test_findings_without_attrs_come_from_the_rows(make_run) -> None:
    """A frame that lost its attrs still tells which findings there were, where and when, and why no more."""
    frame = make_run(findings=(VANISHING,))
    frame.attrs.clear()
    (finding,) = account_of(frame).findings
    assert (finding.finding, finding.layer, finding.first_step, finding.last_step) == ("vanishing", "dense_0", 1, 20)
    assert finding.tensors == VANISHING.tensors
    assert "write_history" in finding.message


@pytest.mark.parametrize(
    "attrs",
    [
        {"findings": "no list"},
        {"findings": [1]},
        {"findings": [{"finding": "x"}]},
        {"findings": [{"finding": "x", "layer": "y", "first_step": "z", "last_step": 1, "message": ""}]},
        {"findings": [{"finding": "x", "layer": "y", "first_step": 1, "last_step": 1, "message": "", "tensors": 5}]},
        {"cost": [1]},
    ],
)
def test_foreign_attrs_are_refused(attrs, make_run) -> None:
    """What a stranger wrote into attrs is answered with an error that shows it."""
    frame = make_run()
    frame.attrs |= attrs
    with pytest.raises(ValueError, match=r"attrs hold (findings|cost) of an unknown form"):
        account_of(frame)


@pytest.mark.parametrize(
    ("first", "last", "steps", "words"),
    [(3, 20, 20, "since step 3"), (3, 3, 20, "step 3"), (3, 9, 20, "steps 3–9"), (1, 1, 1, "step 1")],
)
def test_spans_in_words(first: int, last: int, steps: int, words: str, make_run) -> None:
    """A finding that holds at the last step goes on; others have an end."""
    finding = Finding(finding="exploding", layer="dense_0", first_step=first, last_step=last, message="")
    account = account_of(make_run(steps=steps, findings=(finding,)))
    assert account.span(account.findings[0]) == words


def test_a_mismatch_at_the_last_check_goes_on(make_run) -> None:
    """What only checks can show is not over because training went on after the last one."""
    finding = Finding(finding="mismatch", layer="dense_0", first_step=1, last_step=11, message="")
    account = account_of(make_run(findings=(finding,)))
    assert account.span(finding) == "since step 1"
