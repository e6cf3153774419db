import math
from dataclasses import replace

from keras_gradwatch.findings import Ledger
from keras_gradwatch.records import Finding


def finding(
    name: str = "zero_gradient", layer: str = "dense", steps: tuple[int, int] = (1, 25), **fields: object
) -> Finding:
    fields = {"message": f"{name} in {layer}"} | fields
    return Finding(finding=name, layer=layer, first_step=steps[0], last_step=steps[1], **fields)


def test_a_finding_is_new_once() -> None:
    """The first report is new, later ones extend it."""
    ledger = Ledger()
    assert ledger.update([finding()], step=25) == (finding(),)
    assert ledger.update([finding(steps=(26, 50))], step=50) == ()
    assert ledger.findings == (finding(steps=(1, 50)),)


def test_an_empty_ledger() -> None:
    """Nothing found is nothing listed."""
    ledger = Ledger()
    assert ledger.update([], step=25) == ()
    assert (ledger.findings, ledger.active) == ((), ())


def test_the_worst_value_and_severity_stay_with_their_words() -> None:
    """The message is that of the worst report; the name under which it was first told stays."""
    ledger = Ledger()
    mild = finding("vanishing", "dense", value=-2.5, limit=-2.0, message="mild", tensors=("a",))
    bad = replace(mild, layer="dense_1", value=-7.0, message="bad", first_step=20, last_step=50, tensors=("b",))
    ledger.update([mild], step=25)
    ledger.update([bad], step=50)
    ledger.update([replace(mild, last_step=75)], step=75)
    (merged,) = ledger.findings
    assert (merged.layer, merged.value, merged.message) == ("dense", -7.0, "bad")
    assert (merged.first_step, merged.last_step, merged.tensors) == (1, 75, ("a", "b"))


def test_an_error_outweighs_a_larger_value() -> None:
    """Severity comes first, and NaN is the mildest value."""
    ledger = Ledger()
    ledger.update([finding(severity="warning", value=100.0, limit=1.0)], step=25)
    ledger.update([finding(severity="error", value=math.nan)], step=50)
    assert ledger.findings[0].severity == "error"


def test_layers_and_tensors_are_kept_apart() -> None:
    """The same finding elsewhere is another entry."""
    ledger = Ledger()
    new = ledger.update([finding(layer="a"), finding(layer="b"), finding(layer="b", tensor="b/kernel")], step=25)
    assert len(new) == len(ledger.findings) == 3


def test_events_of_the_whole_run_merge_while_they_overlap() -> None:
    """A window that moves on past the first NaN points elsewhere; it is still the same event."""
    ledger = Ledger()
    ledger.update([finding("nonfinite", "log", (31, 60))], step=60)
    assert ledger.update([finding("nonfinite", "loss", (40, 85))], step=85) == ()
    assert [(f.layer, f.first_step, f.last_step) for f in ledger.findings] == [("log", 31, 85)]
    assert len(ledger.update([finding("nonfinite", "sqrt", (200, 201))], step=201)) == 1


def test_order_is_by_kind_then_by_step() -> None:
    """Readers hear of the most alarming kind first; custom rules come last."""
    ledger = Ledger()
    found = [finding("my_rule", "a"), finding("disconnected", "c", (9, 9)), finding("disconnected", "b", (2, 9))]
    ledger.update([*found, finding("mismatch", "d", (20, 20))], step=25)
    assert [f.layer for f in ledger.findings] == ["d", "b", "c", "a"]


def test_consequences_are_not_findings_of_their_own() -> None:
    """After an explosion or NaN, dead gradients are aftermath, whether reported at once or later."""
    ledger = Ledger()
    new = ledger.update([finding("zero_gradient", steps=(5, 25)), finding("exploding", steps=(1, 25))], step=25)
    assert [f.finding for f in new] == ["exploding"]
    assert ledger.update([finding("vanishing", steps=(30, 50))], step=50) == ()


def test_what_came_first_is_no_consequence() -> None:
    """Vanishing gradients that later explode are two findings."""
    ledger = Ledger()
    ledger.update([finding("vanishing", steps=(1, 25))], step=25)
    ledger.update([finding("exploding", steps=(30, 50)), finding("vanishing", steps=(26, 50))], step=50)
    assert [(f.finding, f.last_step) for f in ledger.findings] == [("exploding", 50), ("vanishing", 50)]


def test_a_wrong_layer_explains_only_what_it_spoils() -> None:
    """A mismatch upstream of a tensor says nothing about another one."""
    ledger = Ledger()
    wrong = finding("mismatch", "scale", (1, 1), tensors=("a", "b"))
    ledger.update([wrong, finding("zero_gradient", "a", (1, 25), tensors=("a",))], step=25)
    ledger.update([finding("zero_gradient", "c", (1, 25), tensors=("c",))], step=25)
    assert [f.layer for f in ledger.findings] == ["scale", "c"]


def test_active_entries_are_those_of_the_last_update() -> None:
    """What is over stays in the account but is not active."""
    ledger = Ledger()
    ledger.update([finding(layer="a"), finding(layer="b")], step=25)
    ledger.update([finding(layer="b", steps=(26, 50))], step=50)
    assert [f.layer for f in ledger.active] == ["b"]
    assert len(ledger.findings) == 2
    assert ledger.step == 50
