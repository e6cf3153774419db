import numpy as np
import pandas as pd

from keras_gradwatch.marks import finding_column, marked_tensors, with_findings
from keras_gradwatch.records import Finding, TensorInfo

IMAGE = TensorInfo(layer="image", tensor="image", role="input", depth=0, shape=(8, 4))
WEIGHTS = tuple(
    TensorInfo(layer=layer, tensor=f"{layer}/{own}", role="weight", depth=depth, shape=(4,))
    for depth, layer in enumerate(("dense", "dense_1"))
    for own in ("kernel", "bias")
)
TENSORS = (IMAGE, *WEIGHTS)


def finding(name: str, layer: str = "dense", steps: tuple[int, int] = (1, 9), **fields: object) -> Finding:
    return Finding(finding=name, layer=layer, first_step=steps[0], last_step=steps[1], message="", **fields)


def marked(found: Finding) -> list[str]:
    return [info.tensor for info, is_marked in zip(TENSORS, marked_tensors(found, TENSORS), strict=True) if is_marked]


def test_a_finding_marks_what_it_names() -> None:
    """The tensors it names, whatever layer it is on; without a list the one tensor."""
    assert marked(finding("nonfinite", "loss", tensors=("dense_1/bias", "image"))) == ["image", "dense_1/bias"]
    assert marked(finding("heavy", tensor="dense/bias")) == ["dense/bias"]


def test_a_finding_that_names_nothing_marks_its_layer() -> None:
    """All weights of the layer; none if it has none."""
    assert marked(finding("heavy", "dense_1")) == ["dense_1/kernel", "dense_1/bias"]
    assert marked(finding("watcher_failed", "GradWatch")) == []


def test_a_finding_on_the_loss_marks_every_weight() -> None:
    """It is about the run as a whole."""
    assert marked(finding("stalled", "loss")) == [info.tensor for info in WEIGHTS]


def test_the_column_joins_names_where_findings_meet() -> None:
    """Most alarming first, each once, and only between first and last step."""
    steps, places = np.repeat([1, 2, 3], 4), np.tile([1, 2, 3, 4], 3)
    findings = [
        finding("own", "dense", (2, 2)),
        finding("stalled", "loss", (2, 3)),
        finding("vanishing", "dense", (1, 2), tensors=("dense/kernel",)),
        finding("vanishing", "dense", (2, 2), tensors=("dense/kernel", "dense/bias")),
    ]
    assert list(finding_column(findings, steps, places, TENSORS)) == [
        "vanishing", "", "", "",
        "vanishing,stalled,own", "vanishing,stalled,own", "stalled", "stalled",
        "stalled", "stalled", "stalled", "stalled",
    ]  # fmt: skip


def test_rows_from_a_file_are_marked_alike() -> None:
    """Names and layers read from rows tell the same as the tensors of the run; what was marked before is replaced."""
    frame = pd.DataFrame(
        {
            "step": np.repeat([1, 2], 5),
            "role": [info.role for info in TENSORS] * 2,
            "layer": [info.layer for info in TENSORS] * 2,
            "tensor": pd.Categorical([info.tensor for info in TENSORS] * 2),
            "findings": "old",
        }
    )
    found = [finding("stalled", "loss", (2, 2)), finding("exploding", "dense_1", (1, 1))]
    assert list(with_findings(frame, found)["findings"]) == [
        "", "", "", "exploding", "exploding", "", "stalled", "stalled", "stalled", "stalled",
    ]  # fmt: skip
    assert list(with_findings(frame.iloc[:0], found)["findings"]) == []
