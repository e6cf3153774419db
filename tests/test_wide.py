"""The history with a column per tensor or layer."""

import numpy as np
import pandas as pd
import pytest

from keras_gradwatch.history import History, read_history, write_history
from keras_gradwatch.records import STATISTICS, StepRecord, TensorInfo
from keras_gradwatch.wide import wide

TENSORS = tuple(
    TensorInfo(layer=layer, tensor=f"{layer}/{name}", role="weight", depth=depth, shape=(2,))
    for depth, layer in enumerate(("second_alphabetically", "first"))
    for name in ("kernel", "bias")
)


def history(steps: int = 3) -> pd.DataFrame:
    kept = History(TENSORS, {"findings": [{"finding": "stalled", "layer": "first", "message": "m"}]})
    for step in range(1, steps + 1):
        numbers = np.full((4, len(STATISTICS)), np.nan)
        numbers[:, STATISTICS.index("grad_norm")] = [3.0 * step, 4.0 * step, 5.0, np.nan]
        numbers[:, STATISTICS.index("update_ratio")] = [0.1, 0.2, 0.3, np.nan]
        numbers[:, STATISTICS.index("nonfinite_count")] = [1, 2, 0, 0]
        kept.append(
            StepRecord(step=10 * step, epoch=0, loss=1.0, statistics=numbers, connected=np.ones(4, dtype=np.bool_))
        )
    return kept.to_frame()


def test_each_tensor_has_a_column_in_network_order() -> None:
    """Steps are the index, tensors the columns as the network has them; one never measured has none."""
    table = history().gradwatch.wide("grad_norm")
    assert list(table.columns) == ["second_alphabetically/kernel", "second_alphabetically/bias", "first/kernel"]
    assert list(table.index) == [10, 20, 30]
    np.testing.assert_array_equal(table["second_alphabetically/bias"], [4.0, 8.0, 12.0])


def test_a_layer_has_the_norm_of_all_its_weights() -> None:
    """3, 4 and 5 make a triangle: norms add as squares; ratios give their largest, counts their sum."""
    frame = history()
    norms = wide(frame, "grad_norm", by="layer")
    assert list(norms.columns) == ["second_alphabetically", "first"]
    np.testing.assert_allclose(norms["second_alphabetically"], [5.0, 10.0, 15.0])
    np.testing.assert_array_equal(wide(frame, "update_ratio", by="layer")["second_alphabetically"], [0.2] * 3)
    np.testing.assert_array_equal(wide(frame, "nonfinite_count", by="layer")["second_alphabetically"], [3] * 3)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_frame_from_a_file_gives_the_same(suffix: str, tmp_path: object) -> None:
    """The accessor works on what read_history gives, findings included."""
    frame, path = history(), f"{tmp_path}/run{suffix}"
    write_history(frame, path)
    read = read_history(path)
    pd.testing.assert_frame_equal(read.gradwatch.wide(), frame.gradwatch.wide())
    assert list(read.gradwatch.findings["finding"]) == ["stalled"]


def test_an_empty_history_gives_an_empty_table() -> None:
    """No rows, no columns, no error; and no findings."""
    empty = History(TENSORS, {}).to_frame()
    assert wide(empty).empty
    assert empty.gradwatch.findings.empty


@pytest.mark.parametrize(
    ("frame", "arguments", "told"),
    [
        (pd.DataFrame({"a": [1]}), {}, "columns a. Expected a history frame"),
        (history(), {"column": "findings"}, "column='findings'. Expected one of"),
        (history(), {"by": "role"}, "by='role'. Expected 'tensor' or 'layer'"),
    ],
)
def test_wrong_questions_are_told(frame: pd.DataFrame, arguments: dict[str, str], told: str) -> None:
    """The message says what came and what was expected."""
    with pytest.raises(ValueError, match=told.replace(".", r"\.")):
        wide(frame, **arguments)  # type: ignore[arg-type]
