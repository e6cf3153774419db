import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from keras_gradwatch.history import SCHEMA, SCHEMA_VERSION, History, check_frame, schema_markdown
from keras_gradwatch.records import (
    FINDINGS,
    STATISTICS,
    VERDICTS,
    CheckResult,
    Finding,
    StepRecord,
    TensorCheck,
    TensorInfo,
)

IMAGE = TensorInfo(layer="image", tensor="image", role="input", depth=0, shape=(8, 3))
KERNEL = TensorInfo(layer="dense_10", tensor="dense_10/kernel", role="weight", depth=1, shape=(3, 4))
BIAS = TensorInfo(layer="dense_10", tensor="dense_10/bias", role="weight", depth=1, shape=(4,))
SCALE = TensorInfo(layer="dense_2", tensor="dense_2/scale", role="weight", depth=2, shape=())
NETWORK = (IMAGE, KERNEL, BIAS, SCALE)


def statistics(step: int, weights: int = 3) -> np.ndarray:
    """Numbers that tell step, weight and statistic apart: 100 step + 10 weight + statistic; no non-finite element."""
    numbers = 100.0 * step + 10.0 * np.arange(weights)[:, None] + np.arange(len(STATISTICS))
    numbers[:, STATISTICS.index("nonfinite_count")] = 0
    return numbers


def check(tensors: tuple[TensorInfo, ...] = NETWORK, verdict: str = "ok") -> CheckResult:
    """A check with error 0.1, 0.2 … in the order of the tensors, bar 10 and rounding 100 times that."""
    checks = [
        TensorCheck(
            tensor=tensor.tensor, verdict=verdict, error=(i + 1) / 10, bar=i + 1.0, rounding_error=10.0 * (i + 1)
        )
        for i, tensor in enumerate(tensors)
    ]
    return CheckResult(tensors=tensors, checks=tuple(checks))


def record(step: int, numbers: np.ndarray | None = None, **fields: object) -> StepRecord:
    numbers = statistics(step) if numbers is None else numbers
    fields = {"epoch": 0, "loss": float(step), "connected": np.ones(len(numbers), np.bool_)} | fields
    return StepRecord(step=step, statistics=numbers, **fields)


def finding(name: str, tensors: tuple[str, ...], first: int, last: int) -> Finding:
    return Finding(finding=name, layer="", first_step=first, last_step=last, message="", tensors=tensors)


def filled(*records: StepRecord, tensors: tuple[TensorInfo, ...] = NETWORK, **settings: int) -> History:
    history = History(tensors, {}, **settings)
    for item in records:
        history.append(item)
    return history


def slow_rows(records: list[StepRecord], findings: list[Finding]) -> list[dict[str, object]]:
    """The rows as plain dictionaries, one at a time."""
    rows = []
    for item in records:
        weight = 0
        for index, tensor in enumerate(NETWORK):
            if tensor.role == "input" and item.check is None:
                continue
            row = {"step": item.step, "epoch": item.epoch, "layer": tensor.layer, "tensor": tensor.tensor}
            row |= {"role": tensor.role, "depth": tensor.depth, "size": tensor.size, "loss": item.loss}
            row |= dict.fromkeys(STATISTICS)
            if tensor.role == "weight":
                row |= dict(zip(STATISTICS, item.statistics[weight].tolist(), strict=True))
                weight += 1
            row["nonfinite_count"] = int(row["nonfinite_count"] or 0)
            result = None if item.check is None else item.check.checks[index]
            row["check"] = None if result is None else result.verdict
            row["check_error"] = None if result is None else result.error
            row["check_bar"] = None if result is None else result.bar
            row["rounding_error"] = None if result is None else result.rounding_error
            active = {
                f.finding for f in findings if tensor.tensor in f.tensors and f.first_step <= item.step <= f.last_step
            }
            known = [name for name in FINDINGS if name in active]
            row["findings"] = ",".join(known + sorted(active - set(known)))
            rows.append(row)
    return rows


def assert_rows(frame: pd.DataFrame, rows: list[dict[str, object]]) -> None:
    assert len(frame) == len(rows)
    for index, row in enumerate(rows):
        for name, expected in row.items():
            seen = frame[name].iloc[index]
            assert pd.isna(seen) if expected is None else seen == expected, (index, name, seen, expected)


def test_frame_holds_what_was_appended() -> None:
    """The frame has the rows that a slow loop over records, tensors and findings gives."""
    records = [
        record(1, check=check()),
        record(2, epoch=1, loss=None),
        record(3, epoch=1, check=check(verdict="mismatch")),
        record(7, epoch=2, loss=float("inf")),
    ]
    findings = [
        finding("vanishing", ("dense_10/kernel", "image"), 2, 3),
        finding("mine", ("dense_2/scale", "dense_10/kernel"), 3, 9),
        finding("mismatch", ("dense_10/kernel",), 1, 2),
    ]
    history = filled(*records)
    history.set_findings(findings)
    assert_rows(history.to_frame(), slow_rows(records, findings))


def test_columns_and_dtypes_are_those_of_the_schema() -> None:
    """Every column of the schema is there, in order and dtype, empty history or not."""
    for history in (filled(), filled(record(1)), filled(record(1, check=check())), filled(tensors=())):
        frame = history.to_frame()
        assert list(frame.columns) == [column.name for column in SCHEMA]
        expected = [pd.Series([], dtype=column.dtype).dtype.name for column in SCHEMA]
        assert [dtype.name for dtype in frame.dtypes] == expected


def test_categories_are_in_network_order() -> None:
    """Categories follow the network, so that dense_10 before dense_2 stays so, also before any row is there."""
    frame = filled().to_frame()
    assert list(frame["layer"].cat.categories) == ["image", "dense_10", "dense_2"]
    assert list(frame["tensor"].cat.categories) == [tensor.tensor for tensor in NETWORK]
    assert list(frame["check"].cat.categories) == list(VERDICTS)
    assert list(frame["role"].cat.categories) == ["weight", "input"]


def test_inputs_have_rows_on_checked_steps_only() -> None:
    """A tracked step gives a row per weight, a checked one also a row per input, at its place in the network."""
    frame = filled(record(1), record(2, check=check())).to_frame()
    assert list(frame["tensor"].astype("str")) == [t.tensor for t in (KERNEL, BIAS, SCALE, *NETWORK)]
    assert frame["check"].isna().tolist() == [True] * 3 + [False] * 4
    assert np.isnan(frame.loc[frame["role"] == "input", "grad_norm"]).all()


def test_step_with_a_check_and_nothing_tracked_has_rows() -> None:
    """All-NaN statistics are rows like others; the count of non-finite elements is then 0."""
    frame = filled(record(4, np.full((3, 7), np.nan), check=check())).to_frame()
    assert len(frame) == 4
    assert frame["grad_norm"].isna().all()
    assert (frame["nonfinite_count"] == 0).all()


def test_check_of_some_tensors_in_another_order_finds_its_rows() -> None:
    """Verdicts go to the tensor they name; a tensor the check left out has none, an unknown one is left out."""
    stranger = TensorInfo(layer="late", tensor="late/kernel", role="weight", depth=9, shape=(1,))
    frame = filled(record(1, check=check((SCALE, stranger, KERNEL)))).to_frame().set_index("tensor")
    errors = frame["check_error"]
    assert [errors["dense_2/scale"], errors["dense_10/kernel"]] == [0.1, pytest.approx(0.3)]
    assert frame["check"].isna().loc[["image", "dense_10/bias"]].all()


def test_equal_tensor_names_in_two_layers_stay_apart() -> None:
    """Variable paths can collide; the check of one then is not the check of the other."""
    twins = tuple(TensorInfo(layer=layer, tensor="w", role="weight", depth=0, shape=(1,)) for layer in "ab")
    frame = filled(record(1, statistics(1, 2), check=check(twins[1:])), tensors=twins).to_frame()
    assert frame["check"].isna().tolist() == [True, False]
    assert frame["grad_norm"].tolist() == [100.0, 110.0]


def test_unknown_loss_is_missing() -> None:
    """A loss that could not be observed is NaN, one that was infinite is Inf."""
    loss = filled(record(1, loss=None), record(2, loss=float("-inf"))).to_frame()["loss"]
    assert np.isnan(loss.iloc[0])
    assert loss.iloc[-1] == -np.inf


def test_scalar_and_empty_tensors_have_their_sizes() -> None:
    """The size of a scalar is 1, of an empty tensor 0."""
    empty = TensorInfo(layer="e", tensor="e/w", role="weight", depth=0, shape=(0, 5))
    frame = filled(record(1, statistics(1, 2)), tensors=(empty, SCALE)).to_frame()
    assert frame["size"].tolist() == [0, 1]


def test_record_is_copied() -> None:
    """The caller may use its array again."""
    numbers = statistics(1)
    history = filled(record(1, numbers))
    numbers[:] = -1
    assert history.to_frame()["grad_norm"].tolist() == [100.0, 110.0, 120.0]


def test_wrong_number_of_weights_is_refused() -> None:
    """Statistics that do not fit the tensors are told with both shapes."""
    with pytest.raises(ValueError, match=r"shape \(2, 7\)\. Expected \(3, 7\)"):
        filled(record(1, statistics(1, 2)))


def test_frame_is_the_callers_own() -> None:
    """What one does to a frame does not show in the next one, nor in the history."""
    history = filled(record(1))
    first = history.to_frame()
    first.loc[0, "grad_norm"] = -1.0
    first.attrs["seed"] = 3
    first["more"] = 1
    second = history.to_frame()
    assert second.loc[0, "grad_norm"] == 100.0
    assert "seed" not in second.attrs
    assert "more" not in second


def test_frame_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking twice builds once; a new step or new findings build again."""
    history = filled(record(1))
    builds = []
    build = history._build
    monkeypatch.setattr(history, "_build", lambda first: builds.append(first) or build(first))
    history.to_frame()
    history.to_frame()
    assert len(builds) == 1
    history.append(record(2))
    assert len(history.to_frame()) == 6
    history.set_findings([finding("stalled", ("dense_2/scale",), 2, 2)])
    assert history.to_frame()["findings"].tolist() == [""] * 5 + ["stalled"]
    assert len(builds) == 3


def test_findings_are_replaced_not_added() -> None:
    """The column shows the present findings only, and each name once where two findings of that name meet."""
    history = filled(record(1))
    history.set_findings([finding("vanishing", ("dense_2/scale",), 1, 1)])
    twice = finding("exploding", ("dense_10/bias",), 1, 5)
    history.set_findings([twice, twice])
    assert history.to_frame()["findings"].tolist() == ["", "exploding", ""]


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 7, 11, 100])
def test_tail_is_the_tail_of_the_frame(rows: int) -> None:
    """The last rows come out the same, index included, as from the whole frame."""
    history = filled(*(record(step, check=check() if step % 2 else None) for step in (1, 2, 3)))
    pd.testing.assert_frame_equal(history.record_tail(rows), history.to_frame().tail(rows))


def test_inputs_alone() -> None:
    """A model without weights to watch has rows on checked steps only."""
    nothing = np.empty((0, 7))
    history = filled(
        record(1, nothing), record(2, nothing, check=check((IMAGE,))), record(3, nothing), tensors=(IMAGE,)
    )
    assert history.to_frame()["step"].tolist() == [2]
    assert len(history.record_tail(5)) == len(history) == 1


def test_attributes_come_with_the_frame() -> None:
    """``attrs`` holds the schema version, what was given as JSON gives it back, and that nothing was thinned."""
    history = History(NETWORK, {"versions": {"keras": "3.15"}, "stop_on": ("mismatch",), "probe": None})
    expected = {"versions": {"keras": "3.15"}, "stop_on": ["mismatch"], "probe": None}
    attributes = history.to_frame().attrs
    assert attributes == {"schema_version": SCHEMA_VERSION, **expected, "thinned": 0}
    assert json.loads(json.dumps(attributes)) == attributes


@pytest.mark.parametrize("value", [{1, 2}, np.int64(3), np.zeros(2), Path("x"), print])
def test_attributes_unfit_for_json_are_refused(value: object) -> None:
    """Settings that no file could hold are refused when the run begins, not when it is saved."""
    with pytest.raises(TypeError, match=r"JSON cannot hold .*'probe'.* Expected strings.*Convert"):
        History(NETWORK, {"probe": value})


def test_attributes_that_hold_themselves_are_refused() -> None:
    """A circle is told as what it is."""
    circle: dict[str, object] = {}
    circle["self"] = circle
    with pytest.raises(TypeError, match="Circular reference"):
        History(NETWORK, circle)


def test_max_rows_must_be_positive() -> None:
    """No room for rows is a mistake."""
    with pytest.raises(ValueError, match=r"max_rows is 0\. Expected 1 or more"):
        History(NETWORK, {}, max_rows=0)


def test_thinning_drops_every_second_of_the_older_half() -> None:
    """With room for 8 steps of 3 rows, the ninth step costs the second and the fourth."""
    history = filled(*(record(step) for step in range(1, 10)), max_rows=24)
    assert history.to_frame()["step"].unique().tolist() == [1, 3, 5, 6, 7, 8, 9]
    assert history.to_frame().attrs["thinned"] == 2


def test_thinning_goes_on_and_keeps_checks_and_non_finite_steps() -> None:
    """Over a long run rows stay bounded, what is left is right, and checks and bad steps are all there."""
    bad = statistics(37)
    bad[1, STATISTICS.index("nonfinite_count")] = 2
    special = {1: record(1, check=check()), 21: record(21, check=check(verdict="kink")), 37: record(37, bad)}
    special[55] = record(55, loss=float("inf"))
    records = {step: special.get(step, record(step)) for step in range(1, 1001)}
    history = History(NETWORK, {}, max_rows=90)
    for item in records.values():
        history.append(item)
        assert len(history) <= 90
    frame = history.to_frame()
    steps = frame["step"].unique().tolist()
    assert set(special) <= set(steps)
    assert steps[-12:] == list(range(989, 1001))  # the newest stay complete
    assert steps == sorted(steps)
    assert frame.attrs["thinned"] == 1000 - len(steps)
    assert_rows(frame, slow_rows([records[step] for step in steps], []))


def test_thinning_keeps_what_led_to_an_event() -> None:
    """The sampled steps before and just after the begin of a finding stay, however long the run goes on."""
    history = History(NETWORK, {}, max_rows=3 * 400)
    for step in range(1, 5001):
        history.append(record(step))
        if step == 300:
            history.keep_around(290)
    assert len(history) <= 3 * 400
    steps = set(history.to_frame()["step"])
    assert steps >= set(range(240, 301))
    assert not steps >= set(range(180, 240))


def test_thinning_is_bounded_when_every_step_is_checked() -> None:
    """When there are no ordinary steps to drop, checked ones go, and those left keep their own verdicts and numbers."""
    checks = [check(verdict=VERDICTS[step % len(VERDICTS)]) for step in range(1, 301)]
    records = {step: record(step, check=result) for step, result in enumerate(checks, start=1)}
    history = filled(*records.values(), max_rows=100)
    frame = history.to_frame()
    steps = frame["step"].unique().tolist()
    assert len(history) == len(frame) <= 100
    assert steps[0] == 1
    assert steps[-1] == 300
    assert_rows(frame, slow_rows([records[step] for step in steps], []))


def test_one_step_larger_than_the_room_is_held() -> None:
    """The newest or the first step never leaves the history empty."""
    history = filled(record(1), record(2), record(3), max_rows=1)
    assert len(history) == 3


def test_append_is_amortised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of records moved while 20,000 steps come in, with thinning under way, is a small multiple of them."""
    history = History((SCALE,), {}, max_rows=1000)
    moved = []
    keep = history._steps.keep
    monkeypatch.setattr(history._steps, "keep", lambda chosen: moved.append(len(chosen)) or keep(chosen))
    for step in range(1, 20_001):
        history.append(record(step, statistics(step, 1)))
    # A quarter of 1000 is freed each time, so each step pays for about four moves.
    assert sum(moved) < 5 * 20_000


def test_check_frame_has_a_row_per_tensor() -> None:
    """A single check comes as a frame with the dtypes of the history, and with factor and reason."""
    checks = (
        TensorCheck(tensor="image", verdict="ok", error=1e-9, bar=1e-8, rounding_error=1e-7),
        TensorCheck(tensor="dense_10/kernel", verdict="mismatch", error=0.1, factor=1.1, reason="a, b"),
    )
    frame = check_frame(CheckResult(tensors=(IMAGE, KERNEL), checks=checks))
    assert frame["layer"].tolist() == ["image", "dense_10"]
    assert frame["size"].tolist() == [24, 12]
    assert frame["check"].tolist() == ["ok", "mismatch"]
    assert frame["factor"].iloc[1] == 1.1
    assert frame["reason"].tolist() == ["", "a, b"]
    dtypes = {column.name: pd.Series([], dtype=column.dtype).dtype.name for column in SCHEMA}
    own = {"factor": "float64", "reason": dtypes["findings"]}
    expected = [column.name for column in SCHEMA if column.name in frame] + ["factor", "reason"]
    assert {name: dtype.name for name, dtype in frame.dtypes.items()} == {
        name: (dtypes | own)[name] for name in expected
    }
    assert list(frame.columns) == expected


def test_check_frame_of_nothing() -> None:
    """A check without tensors is a frame without rows, with the same columns and dtypes."""
    empty = check_frame(CheckResult(tensors=(), checks=()))
    assert len(empty) == 0
    assert [d.name for d in empty.dtypes] == [d.name for d in check_frame(check()).dtypes]


def test_schema_as_markdown() -> None:
    """The documentation's table has a line for each column, and no cell breaks it."""
    lines = schema_markdown().splitlines()
    assert len(lines) == 2 + len(SCHEMA)
    assert lines[2] == "| `step` | int64 | optimizer steps done, from 1 |"
    assert {line.count("|") for line in lines} == {4}
