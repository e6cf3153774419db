import math
from dataclasses import replace

import pytest

from keras_gradwatch.records import VERDICTS, CheckResult, Culprit, Finding, TensorCheck, TensorInfo
from keras_gradwatch.summary import render_check, summarize

LAYERS = ("dense", *(f"dense_{k}" for k in range(1, 9)))
IMAGE = TensorInfo(layer="image", tensor="image", role="input", depth=0, shape=(8, 3))
WEIGHTS = tuple(
    TensorInfo(layer=layer, tensor=f"{layer}/{part}", role="weight", depth=depth, shape=(3, 4), layer_class="Dense")
    for depth, layer in enumerate(LAYERS)
    for part in ("kernel", "bias")
)
TENSORS = (IMAGE, *WEIGHTS)
CULPRIT = Culprit(layer="scale_1", layer_class="Scale", parts=("input",), factor=1.1, error=0.091, bar=3e-7)


def check(
    verdicts: dict[str, str] | None = None, tensors: tuple[TensorInfo, ...] = TENSORS, **fields: object
) -> CheckResult:
    """A check in which the tensors named have the verdicts given, and all others are right."""
    verdicts = verdicts or {}
    rows = [TensorCheck(tensor=t.tensor, verdict="ok", error=4e-9, bar=2e-8, rounding_error=3e-7) for t in tensors]
    rows = [replace(row, verdict=verdicts.get(row.tensor, "ok")) for row in rows]
    return CheckResult(tensors=tensors, checks=tuple(rows), **fields)


def finding(name: str = "vanishing", layer: str = "dense", **fields: object) -> Finding:
    fields = {"first_step": 1, "last_step": 5, "message": "gradients fade"} | fields
    return Finding(finding=name, layer=layer, **fields)


def test_healthy_run() -> None:
    """A run without findings says so first, then how sure it is."""
    assert summarize(600, TENSORS, checks=[check()] * 6, cost_share=0.013).splitlines() == [
        "GradWatch   600 steps · 18 weights, 1 input · checked 6 times · cost 1.3 % of training time",
        "✓ no findings",
        "✓ all 18 weights and the input are right: worst error 4e-09 (bar 2e-08), rounding at most 3e-07",
    ]


def test_run_with_a_culprit_and_a_symptom() -> None:
    """Verdict, culprit, why, what to try, and how sure, in this order; what is known is not told twice."""
    wrong = {"dense/kernel": "mismatch", "dense/bias": "mismatch", "image": "mismatch"}
    mismatch = finding(
        "mismatch", "scale_1", last_step=1, severity="error", message="1.10 × the slope", tensors=tuple(wrong)
    )
    faded = tuple(tensor.tensor for tensor in WEIGHTS[:16])
    vanishing = finding(last_step=400, message="falls by 10^6.2", advice="use relu", tensors=faded)
    text = summarize(600, TENSORS, findings=[vanishing, replace(mismatch, advice="compare")], checks=[check(wrong)])
    assert [line.rstrip() for line in text.splitlines()] == [
        "GradWatch   600 steps · 18 weights, 1 input · checked once",
        f"{'✗ mismatch    scale_1':<72}  since step 1",
        "    1.10 × the slope",
        "    try: compare",
        f"{'! vanishing   dense … dense_7':<72}  steps 1–400",
        "    falls by 10^6.2",
        "    try: use relu",
        "✓ 16 of 18 weights are right: worst error 4e-09 (bar 2e-08), rounding at most 3e-07",
    ]


def test_nothing_tracked() -> None:
    """Before any training the summary says that there is nothing to say."""
    assert "? nothing was tracked" in summarize(0, ())
    assert summarize(0, ()).startswith("GradWatch   0 steps · no tensors · not checked")
    assert "✓" not in summarize(0, TENSORS)


def test_no_checks() -> None:
    """Without a check the summary does not claim that gradients are right."""
    text = summarize(5, TENSORS)
    assert "✓ no findings" in text
    assert "? no gradient check was made" in text
    assert "right: " not in text


def test_unknown_cost_is_not_told() -> None:
    """A cost of NaN leaves no trace."""
    assert "cost" not in summarize(5, TENSORS, cost_share=math.nan)
    assert "cost 0.0 %" in summarize(5, TENSORS, cost_share=0.0)


def test_many_findings_are_folded() -> None:
    """Of twenty findings of a kind three are told and the rest share a line; a kind of four is told in full."""
    many = [finding("dead_units", layer, tensors=(f"{layer}/kernel",)) for layer in LAYERS]
    text = summarize(9, TENSORS, findings=many)
    assert text.count("gradients fade") == 3
    assert "  … and 6 more dead_units: dense_3 … dense_8" in text
    assert summarize(9, TENSORS, findings=many[:4]).count("gradients fade") == 4


def test_findings_are_in_order_of_weight() -> None:
    """The worst kind comes first, a custom one last, whatever order they came in."""
    names = ["mine", "stalled", "vanishing", "mismatch"]
    text = summarize(9, TENSORS, findings=[finding(name) for name in names])
    places = [text.index(name) for name in names]
    assert places == sorted(places, reverse=True)


@pytest.mark.parametrize(
    ("first", "last", "span"),
    [(3, 3, "step 3"), (3, 7, "steps 3–7"), (3, 9, "since step 3"), (1234, 5678, "steps 1,234–5,678")],
)
def test_span_of_a_finding(first: int, last: int, span: str) -> None:
    """The reader learns since when, and whether it is over."""
    text = summarize(9 if last < 10 else 9999, TENSORS, findings=[finding(first_step=first, last_step=last)])
    assert text.splitlines()[1].endswith(f"  {span}")


def test_layer_of_a_finding_has_its_class() -> None:
    """A layer is named with its class, the loss as itself."""
    text = summarize(
        9, TENSORS, findings=[finding("exploding"), finding("nonfinite", "loss", tensors=("dense/kernel",))]
    )
    assert "! exploding   layer dense (Dense)" in text
    assert "! nonfinite   loss  " in text


@pytest.mark.parametrize("verdict", [verdict for verdict in VERDICTS if verdict != "ok"])
def test_each_verdict_has_its_line(verdict: str) -> None:
    """Tensors that are not ok are counted, explained and named in one line, the others are right."""
    result = check({"dense/bias": verdict, "dense_3/bias": verdict})
    lines = summarize(9, TENSORS, checks=[result]).splitlines()
    told = [line for line in lines if "dense/bias, dense_3/bias" in line]
    assert len(told) == 1
    assert told[0][2:].startswith("2 weights ")
    assert any(line.startswith("✓ 16 of 18 weights and the input are right") for line in lines)


def test_wrong_without_a_rule_is_not_called_fine() -> None:
    """With the rules off, a wrong tensor still keeps the summary from saying that there is nothing."""
    text = summarize(9, TENSORS, checks=[check({"dense/bias": "mismatch"})])
    assert "no findings" not in text
    assert "✗ 1 weight wrong: the gradient is not the slope of the loss: dense/bias" in text


def test_reason_is_told() -> None:
    """The reason of the first such tensor stands for its verdict."""
    result = check({"dense/bias": "inconclusive"})
    rows = [
        replace(row, reason="not float64: cast_1") if row.verdict == "inconclusive" else row for row in result.checks
    ]
    text = summarize(9, TENSORS, checks=[replace(result, checks=tuple(rows))])
    assert "? 1 weight not certified (not float64: cast_1): dense/bias" in text


def test_once_wrong_is_wrong() -> None:
    """A mismatch in any check counts, however many later ones were right."""
    assert "1 weight wrong" in summarize(9, TENSORS, checks=[check({"dense/bias": "mismatch"}), check()])


def test_conclusions_outlive_doubts() -> None:
    """A later check that could not decide takes nothing back, and an early doubt is settled by a later conclusion."""
    doubt = check({"dense/bias": "inconclusive"})
    for checks in ([doubt, check()], [check(), doubt]):
        assert "all 18 weights" in summarize(9, TENSORS, checks=checks)


def test_worst_numbers_of_all_checks_are_told() -> None:
    """The errors told are the largest of any check, NaN left aside."""
    rows = [replace(row, error=7e-9, bar=math.nan, rounding_error=math.nan) for row in check().checks]
    text = summarize(9, TENSORS, checks=[replace(check(), checks=tuple(rows)), check()])
    assert "worst error 7e-09 (bar 2e-08), rounding at most 3e-07" in text


def test_sleeping_check_certifies_nothing() -> None:
    """When the check would not have seen a planted error, nothing is called right."""
    text = summarize(9, TENSORS, checks=[check(awake=False)])
    assert "are right" not in text
    assert "not certified (the check's own control failed" in text
    assert render_check(check(awake=False)).startswith("? inconclusive")
    assert "the check's own control failed" in render_check(check(awake=False))


def test_unchecked_tensors_are_told() -> None:
    """A weight that no check covered is not passed over."""
    text = summarize(9, TENSORS, checks=[check(tensors=TENSORS[:-1])])
    assert "? 1 weight never checked: dense_8/bias" in text
    assert "17 of 18 weights and the input are right" in text


def test_notes_come_last_and_once() -> None:
    """Remarks of the checks and of the run end the text, each once."""
    text = summarize(9, TENSORS, checks=[check(notes=("odd loss",))] * 2, notes=("odd loss", "late"))
    assert text.splitlines()[-2:] == ["note: odd loss", "note: late"]


def test_single_tensor() -> None:
    """The words agree with a single weight."""
    text = summarize(1, WEIGHTS[:1], checks=[check(tensors=WEIGHTS[:1])])
    assert text.startswith("GradWatch   1 step · 1 weight · checked once")
    assert "✓ the weight is right" in text


NASTY = tuple(
    TensorInfo(layer=name, tensor=f"{name}/kernel", role="weight", depth=0, shape=(0,), layer_class="C" * 70)
    for name in ("x" * 300, "two\nlines\x1b[31m", "a b " * 60, "é" * 120)
)


def test_every_line_fits() -> None:
    """Whatever the names, no line is wider than 100 columns and none holds a control character."""
    findings = [finding(layer=t.layer, message=t.layer * 3, advice=t.layer, tensors=(t.tensor,)) for t in NASTY]
    result = check(
        {NASTY[0].tensor: "mismatch", NASTY[1].tensor: "kink"}, NASTY, notes=("x " * 200,), culprits=(CULPRIT,)
    )
    texts = [summarize(10**9, NASTY, findings=findings, checks=[result], cost_share=0.5), render_check(result)]
    for line in "\n".join(texts).split("\n"):
        assert len(line) <= 100, line
        assert line.isprintable(), line


def test_failed_check_names_the_culprit() -> None:
    """The printed check gives the verdict, then the layer with the evidence, then the tensors, then a table of all."""
    rows = tuple(
        replace(row, verdict="mismatch", error=0.091, factor=1.1) if row.tensor == "dense/kernel" else row
        for row in check().checks[:3]
    )
    result = CheckResult(tensors=TENSORS[:3], checks=rows, culprits=(CULPRIT,), loss=math.log(2), evaluations=26)
    assert render_check(result).splitlines() == [
        "✗ mismatch   2 weights, 1 input checked · 1 mismatch, 2 ok · loss 0.693147 · 26 loss evaluations",
        "  ✗ scale_1 (Scale): its backward gives 1.10 × the true slope w.r.t. its input (error 9.1e-02, bar",
        "    3e-07)",
        "  ✗ dense/kernel  mismatch      1.10 × the true slope",
        "    tensor        verdict         error      bar  rounding",
        "  ✓ image         ok            4.0e-09  2.0e-08   3.0e-07",
        "  ✗ dense/kernel  mismatch      9.1e-02  2.0e-08   3.0e-07",
        "  ✓ dense/bias    ok            4.0e-09  2.0e-08   3.0e-07",
    ]


def test_passed_check() -> None:
    """A check that found nothing is one line and its table."""
    lines = render_check(check()).splitlines()
    assert lines[0] == "✓ ok   18 weights, 1 input checked · 19 ok"
    assert len(lines) == 2 + len(TENSORS)


@pytest.mark.parametrize(
    ("verdict", "mark"),
    [("ok", "✓"), ("kink", "✓"), ("zero", "✓"), ("declared", "✓"), ("inconclusive", "?"), ("imprecise", "✗")],
)
def test_mark_of_the_whole_check(verdict: str, mark: str) -> None:
    """What is no fault passes and says so, doubt is a question, a fault is a fault."""
    no_fault = ": no fault" if verdict in ("kink", "zero", "declared") else ""
    assert render_check(check({"dense/bias": verdict})).startswith(f"{mark} {verdict}{no_fault}   ")


def test_missing_numbers_are_dashes() -> None:
    """NaN in the table is a dash in its column, Inf is told."""
    row = TensorCheck(tensor="image", verdict="nonfinite", error=math.inf)
    last = render_check(CheckResult(tensors=(IMAGE,), checks=(row,))).splitlines()[-1]
    assert last == "  ✗ image   nonfinite         inf        –         –"


def test_large_model_has_no_table() -> None:
    """Beyond 40 tensors only those that are not right are listed, 40 of them, most alarming first."""
    many = tuple(replace(WEIGHTS[0], tensor=f"w{k}") for k in range(100))
    assert len(render_check(check(tensors=many)).splitlines()) == 1
    verdicts = {f"w{k}": "kink" for k in range(50)} | {"w99": "mismatch"}
    lines = render_check(check(verdicts, many)).splitlines()
    assert "w99" in lines[1]
    assert lines[-1] == "  … and 11 more"
    assert len(lines) == 1 + 40 + 1


def test_empty_check() -> None:
    """Nothing checked is told as such, and is no success."""
    assert render_check(CheckResult(tensors=(), checks=())) == "? inconclusive   nothing checked"
