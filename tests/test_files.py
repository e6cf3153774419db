import gzip
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_gradwatch.files import read_history, write_history
from keras_gradwatch.history import History
from keras_gradwatch.records import STATISTICS, CheckResult, Finding, StepRecord, TensorCheck, TensorInfo
from keras_gradwatch.schema import SCHEMA

PLAIN = ("image", "dense_10", "dense_2")
#: Names that CSV, number parsers or missing-value rules could take for something else.
WEIRD = (
    "a,b",
    'say "hi"',
    "two\nlines",
    "two\r\nlines",
    "# note",
    "None",
    "NaN",
    "1e5",
    " space ",
    "−×·",
    "''",
    "0",
    "#",
    "é",
)
SUFFIXES = (".csv", ".csv.gz", ".parquet")


def network(layers: tuple[str, ...]) -> tuple[TensorInfo, ...]:
    """The first layer is the input, each other one has a kernel."""
    inputs = [TensorInfo(layer=layers[0], tensor=layers[0], role="input", depth=0, shape=(8, 3))] if layers else []
    weights = [
        TensorInfo(layer=layer, tensor=f"{layer}/kernel", role="weight", depth=depth, shape=(3, 4))
        for depth, layer in enumerate(layers[1:], start=1)
    ]
    return (*inputs, *weights)


def run(layers: tuple[str, ...] = PLAIN) -> pd.DataFrame:
    """Three steps: the first checked, the second with NaN and Inf, the third fine; a finding on the last layer."""
    tensors = network(layers)
    numbers = np.random.default_rng(0).lognormal(size=(3, max(0, len(layers) - 1), len(STATISTICS)))
    numbers[:, :, STATISTICS.index("nonfinite_count")] = [[0], [5], [0]]
    numbers[1, :, :3] = np.nan, np.inf, -np.inf
    checks = tuple(
        TensorCheck(tensor=t.tensor, verdict="ok", error=1 / 3, bar=1e-300, rounding_error=np.nan) for t in tensors
    )
    history = History(tensors, {"seed": 7, "note": 'line\nend, "quoted" # é', "probe": [8, None]})
    for step in range(3):
        history.append(
            StepRecord(
                step=step + 1,
                epoch=0,
                loss=[0.1, np.nan, np.inf][step],
                statistics=numbers[step],
                connected=np.ones(len(numbers[step]), np.bool_),
                check=CheckResult(tensors=tensors, checks=checks) if step == 0 else None,
            )
        )
    marked = tuple(tensor.tensor for tensor in tensors[-1:])
    both = [
        Finding(finding=name, layer="", first_step=2, last_step=3, message="", tensors=marked) for name in ("b", "a")
    ]
    history.set_findings(both)
    return history.to_frame()


def assert_same(read: pd.DataFrame, written: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(read, written, check_exact=True)
    assert read.attrs == written.attrs


@pytest.mark.parametrize("layers", [PLAIN, WEIRD], ids=["plain", "weird"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_written_history_reads_back_the_same(tmp_path: Path, suffix: str, layers: tuple[str, ...]) -> None:
    """Every bit of every number, every name, category and attribute survives, NaN, Inf and odd names included."""
    path = tmp_path / f"run{suffix}"
    write_history(run(layers), path)
    assert_same(read_history(path), run(layers))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_empty_history_reads_back_empty(tmp_path: Path, suffix: str) -> None:
    """A history without rows keeps columns, dtypes and attributes; categories that no row uses go."""
    path = str(tmp_path / f"run{suffix}")
    written = History(network(PLAIN), {"seed": 7}).to_frame()
    write_history(written, path)
    written["layer"] = written["layer"].cat.remove_unused_categories()
    written["tensor"] = written["tensor"].cat.remove_unused_categories()
    read = read_history(path)
    pd.testing.assert_frame_equal(read, written, check_index_type=False)
    assert read.attrs == written.attrs


# Without NUL, which ends a string for the parser of pandas 2.
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)


@given(st.lists(NAMES, min_size=1, max_size=4, unique=True))
def test_any_names_survive_csv(tmp_path_factory: pytest.TempPathFactory, layers: list[str]) -> None:
    """Whatever Unicode a layer is named, it comes back."""
    path = tmp_path_factory.mktemp("names") / "run.csv"
    write_history(run(tuple(layers)), path)
    assert_same(read_history(path), run(tuple(layers)))


@pytest.mark.parametrize("index", [False, True])
def test_plain_csv_of_pandas_is_read(tmp_path: Path, index: bool) -> None:
    """What ``frame.to_csv`` wrote, with its index column or without, is read; it had no room for attributes."""
    path = tmp_path / "run.csv"
    run().to_csv(path, index=index)
    read = read_history(path)
    pd.testing.assert_frame_equal(read, run(), check_exact=True)
    assert read.attrs == {}


def test_plain_parquet_of_pandas_is_read(tmp_path: Path) -> None:
    """What ``frame.to_parquet`` wrote of a part of the rows is read, numbered from 0, with all its categories."""
    path = tmp_path / "run.parquet"
    late = run().query("step == 3")
    late.to_parquet(path)
    assert_same(read_history(path), late.reset_index(drop=True))


def test_csv_of_a_spreadsheet_is_read(tmp_path: Path) -> None:
    """A byte order mark, Windows line ends and spelled-out NaN do no harm."""
    path = tmp_path / "run.csv"
    run().to_csv(path, index=False, na_rep="NaN", lineterminator="\r\n", encoding="utf-8-sig")
    pd.testing.assert_frame_equal(read_history(path), run(), check_exact=True)


def test_csv_puts_layers_in_order_of_depth(tmp_path: Path) -> None:
    """Rows of a later layer may come first; the network order is that of depth."""
    path = tmp_path / "run.csv"
    run().iloc[::-1].to_csv(path, index=False)
    assert list(read_history(path)["layer"].cat.categories) == list(PLAIN)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_columns_of_ones_own_are_kept(tmp_path: Path, suffix: str) -> None:
    """A column added by the user comes back after ours."""
    path = tmp_path / f"run{suffix}"
    write_history(run().assign(host=1)[["host", *(column.name for column in SCHEMA)]], path)
    assert list(read_history(path).columns) == [*(column.name for column in SCHEMA), "host"]


def foreign_files() -> dict[str, tuple[str, bytes]]:
    """Name: suffix and content of files that are no history."""
    lacking = run().drop(columns=["layer", "findings"]).to_csv(index=False).encode()
    text = run().to_csv(index=False)
    return {
        "empty csv": (".csv", b""),
        "only a header of ours": (".csv", b"# keras_gradwatch {}\n"),
        "broken header": (".csv", b"# keras_gradwatch {\n" + text.encode()),
        "header of a list": (".csv", b"# keras_gradwatch [1]\n" + text.encode()),
        "columns missing": (".csv", lacking),
        "unknown verdict": (".csv", text.replace(",ok,", ",fine,").encode()),
        "unknown role": (".csv", text.replace(",weight,", ",bias,").encode()),
        "word for a number": (".csv", text.replace(",0.1,", ",much,").encode()),
        "ragged": (".csv", text.encode() + b"1,2,3" + b",4" * 40 + b"\n"),
        "not text": (".csv", bytes(range(256)) * 8),
        "not gzip": (".csv.gz", text.encode()),
        "cut gzip": (".csv.gz", gzip.compress(text.encode())[:200]),
        "bad gzip": (".csv.gz", gzip.compress(text.encode())[:60] + b"\xff" * 99),
        "not parquet": (".parquet", b"PAR1 but not really PAR1"),
        "empty parquet": (".parquet", b""),
    }


@pytest.mark.parametrize("name", foreign_files())
def test_foreign_file_is_refused(tmp_path: Path, name: str) -> None:
    """A file that is no history gives one ValueError: which file, what was expected, how to write one."""
    suffix, content = foreign_files()[name]
    path = tmp_path / f"foreign{suffix}"
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"(?s)foreign.*holds no gradient history: .*Expected .*step, epoch.*Write one"
    ):
        read_history(path)


def test_foreign_parquet_names_the_missing_columns(tmp_path: Path) -> None:
    """The message lists what is not there."""
    path = tmp_path / "foreign.parquet"
    run().drop(columns=["layer", "findings"]).to_parquet(path)
    with pytest.raises(ValueError, match="it lacks the columns layer, findings"):
        read_history(path)


def test_broken_parquet_is_refused(tmp_path: Path) -> None:
    """A Parquet file with bytes flipped anywhere is read right or refused, and nothing else comes out."""
    path = tmp_path / "run.parquet"
    write_history(run(), path)
    content = path.read_bytes()
    refused = []
    for place in np.random.default_rng(0).integers(0, len(content), 60):
        path.write_bytes(content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :])
        try:
            read_history(path)
        except ValueError as error:
            refused.append(str(error))
    assert refused
    assert all("holds no gradient history" in message for message in refused)


class Bomb:
    """Says so when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return pytest.fail, ("a file was executed",)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_nothing_in_a_file_is_executed(tmp_path: Path, suffix: str) -> None:
    """A pickle under one of our endings is refused unopened."""
    path = tmp_path / f"bomb{suffix}"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="holds no gradient history"):
        read_history(path)


@pytest.mark.parametrize("name", ["run.pkl", "run", "run.csv.zip", "csv"])
def test_unknown_ending_is_refused(tmp_path: Path, name: str) -> None:
    """Only CSV and Parquet are read and written."""
    with pytest.raises(ValueError, match=r"no known ending\. Expected \.csv, \.csv\.gz or \.parquet\. Name"):
        read_history(tmp_path / name)
    with pytest.raises(ValueError, match="no known ending"):
        write_history(run(), tmp_path / name)


def test_missing_file_is_told_as_such(tmp_path: Path) -> None:
    """A file that is not there is FileNotFoundError, not a foreign file."""
    with pytest.raises(FileNotFoundError):
        read_history(tmp_path / "run.csv")


def test_missing_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pyarrow the message says what to install."""
    path = tmp_path / "run.parquet"
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"keras-gradwatch\[parquet\]"):
        write_history(run(), path)
    path.touch()
    with pytest.raises(ImportError, match=r"keras-gradwatch\[parquet\]"):
        read_history(path)
