import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from keras_gradwatch.cli import FAILED, FOUND, WELL, main
from keras_gradwatch.comparison import compare, comparison_words
from keras_gradwatch.files import write_history
from keras_gradwatch.pictures import View
from keras_gradwatch.records import Finding

WARNING = Finding(
    finding="vanishing", layer="dense_0", first_step=1, last_step=20, message="gradient fades", advice="use relu",
    tensors=("model/dense_0/kernel",), value=float("nan"),
)  # fmt: skip
ERROR = Finding(
    finding="mismatch", layer="dense_1", first_step=1, last_step=11, severity="error", message="wrong",
    tensors=("model/dense_1/kernel",),
)  # fmt: skip


@pytest.fixture
def saved(make_run: Callable[..., pd.DataFrame], tmp_path: Path) -> Callable[..., str]:
    """Writes a run and gives its path."""

    def write(name: str = "run.csv", **settings: object) -> str:
        write_history(make_run(**settings), tmp_path / name)
        return str(tmp_path / name)

    return write


def run_python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.parametrize("name", ["run.csv", "run.csv.gz", "run.parquet"])
def test_show_tells_the_summary(name: str, saved, capsys: pytest.CaptureFixture[str]) -> None:
    """A saved run is told in the words of its summary, findings with their advice."""
    assert main(["show", saved(name, findings=(WARNING,))]) == WELL
    text = capsys.readouterr().out
    assert text.startswith("GradWatch   20 steps · 6 weights, 1 input · checked 2 times")
    assert "! vanishing   layer dense_0 (Dense)" in text
    assert "gradient fades" in text
    assert "try: use relu" in text


@pytest.mark.parametrize(
    ("findings", "severity", "status"),
    [
        ((), "info", WELL),
        ((WARNING,), "error", WELL),
        ((WARNING,), "warning", FOUND),
        ((ERROR,), "error", FOUND),
        ((ERROR,), "never", WELL),
    ],
)
def test_the_exit_status_follows_the_severity_asked_for(findings, severity: str, status: int, saved) -> None:
    """A CI job fails from the severity on that it asks for, and only then."""
    assert main(["show", saved(findings=findings), "--fail-on", severity]) == status


def test_wrong_gradients_fail_without_a_finding(saved) -> None:
    """A mismatch in the checks is an error, also when no rule was asked."""
    assert main(["show", saved(wrong=1)]) == FOUND


def test_json_is_strict(saved, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON has null for NaN, and the findings with all their fields."""
    main(["show", saved(findings=(WARNING,)), "--json"])
    content = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} in JSON"))
    assert content["steps"] == 20
    assert content["weights"] == 6
    assert content["findings"][0]["finding"] == "vanishing"
    assert content["findings"][0]["value"] is None
    assert content["checks"] == [{"step": 1, "verdicts": {"ok": 7}}, {"step": 11, "verdicts": {"ok": 7}}]


def test_report_is_written_beside_the_run(saved, capsys: pytest.CaptureFixture[str]) -> None:
    """Without -o the page has the name of the run."""
    path = Path(saved("run.csv.gz"))
    assert main(["report", str(path)]) == WELL
    assert (path.parent / "run.html").read_text("utf-8").startswith("<!DOCTYPE html>")
    assert "run.html" in capsys.readouterr().out


def test_report_goes_where_it_is_sent(saved, tmp_path: Path) -> None:
    """-o names the page, and the exit status is that of the findings."""
    assert main(["report", saved(findings=(ERROR,)), "-o", str(tmp_path / "other.html")]) == FOUND
    assert "mismatch" in (tmp_path / "other.html").read_text("utf-8")


def test_compare_tells_what_came(saved, capsys: pytest.CaptureFixture[str]) -> None:
    """A finding that only the second run has is told, sets the exit status, and its layer is listed."""
    first, second = saved("a.csv"), saved("b.csv", wrong=3, findings=(ERROR,))
    assert main(["compare", first, second]) == FOUND
    text = capsys.readouterr().out
    assert "+ mismatch only in B: layer dense_1 (Dense)" in text
    assert "ok → mismatch" in text
    assert "2 layers alike" in text


def test_compare_forgives_what_went(saved, capsys: pytest.CaptureFixture[str]) -> None:
    """A finding that the second run no longer has is told, and is no failure."""
    assert main(["compare", saved("a.csv", findings=(ERROR,)), saved("b.csv")]) == WELL
    assert "- mismatch only in A" in capsys.readouterr().out


def test_equal_runs_agree(saved, capsys: pytest.CaptureFixture[str]) -> None:
    """A run does not differ from itself."""
    path = saved()
    assert main(["compare", path, path]) == WELL
    assert "✓ the 3 layers in both agree" in capsys.readouterr().out


def test_compare_in_numbers(make_run) -> None:
    """Medians, verdicts and findings stand side by side; layers that only one has are kept."""
    first, second = make_run(layers=2), make_run(layers=3, wrong=1, findings=(WARNING,))
    second["grad_norm"] *= 8
    table = compare(first, second)
    assert list(table.index) == ["dense_0", "dense_1", "dense_2"]
    assert table["in_both"].tolist() == [True, True, False]
    assert table.loc["dense_1", "rms_second"] / table.loc["dense_1", "rms_first"] == pytest.approx(0.8, rel=0.1)
    assert np.isnan(table.loc["dense_2", "rms_first"])
    assert table.loc["dense_0", ["check_first", "check_second"]].tolist() == ["ok", "mismatch"]
    assert table.loc["dense_0", "findings_second"] == "vanishing"
    words = comparison_words(View(first), View(second), names=("a", "b"))
    assert "1 layer only in B: dense_2" in words


def test_compare_as_json(saved, capsys: pytest.CaptureFixture[str]) -> None:
    """New findings and a row per layer."""
    main(["compare", saved("a.csv"), saved("b.csv", findings=(ERROR,)), "--json"])
    content = json.loads(capsys.readouterr().out)
    assert [finding["finding"] for finding in content["new_findings"]] == ["mismatch"]
    assert [row["layer"] for row in content["layers"]] == ["dense_0", "dense_1", "dense_2"]


# -- hostile input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["show", "report"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.csv", b""),
        ("run.csv", b"a,b\n1,2\n"),
        ("run.csv", b'# keras_gradwatch {"findings": 5}\r\n'),
        ("run.csv", b"\x00\xff\xfe" * 50),
        ("run.csv.gz", b"not gzip"),
        ("run.parquet", b"PAR1 and no more"),
        ("run.parquet", b""),
        ("run.txt", b"hello"),
    ],
)
def test_foreign_files_are_told_and_exit_2(command: str, name: str, content: bytes, tmp_path: Path, capsys) -> None:
    """Whatever is in a file, the answer is one line on stderr and status 2, and no page is written."""
    path = tmp_path / name
    path.write_bytes(content)
    assert main([command, str(path)]) == FAILED
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("keras-gradwatch: error: ")
    assert name in captured.err
    assert captured.err.count("\n") == 1
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize("name", ["run.csv", "run.csv.gz", "run.parquet"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.97])
def test_truncated_files_never_crash(name: str, share: float, saved, capsys) -> None:
    """A file that was cut off is refused; of a CSV file the whole lines before the cut may be told."""
    path = Path(saved(name))
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert main(["show", str(path)]) in ((WELL, FAILED) if name == "run.csv" else (FAILED,))


@pytest.mark.parametrize("name", ["missing.csv", "missing.parquet"])
def test_a_missing_file_is_told(name: str, tmp_path: Path, capsys) -> None:
    """The system's own words, status 2."""
    assert main(["show", str(tmp_path / name)]) == FAILED
    assert "No such file" in capsys.readouterr().err


def test_a_folder_is_no_run(tmp_path: Path, capsys) -> None:
    """A folder is told as such, whatever its name."""
    (tmp_path / "run.csv").mkdir()
    assert main(["show", str(tmp_path / "run.csv")]) == FAILED


def test_absurd_sizes_are_refused_before_reading(saved, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that claims more rows or bytes than a history can have is not read."""
    path = saved("run.parquet")
    monkeypatch.setattr("keras_gradwatch.cli.MOST_ROWS", 100)
    assert main(["show", path]) == FAILED
    assert "claims 122 rows. Expected at most 100" in capsys.readouterr().err
    monkeypatch.setattr("keras_gradwatch.cli.MOST_BYTES", 10)
    assert main(["show", path]) == FAILED
    assert "Expected at most 10" in capsys.readouterr().err


def test_a_small_file_that_unpacks_to_a_giant_is_refused(saved, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size that counts is that of the unpacked text."""
    path = saved("run.csv.gz")
    packed = Path(path).stat().st_size
    monkeypatch.setattr("keras_gradwatch.cli.MOST_BYTES", packed + 100)
    assert main(["show", path]) == FAILED
    assert f"unpacks to more than {packed + 100:,} bytes" in capsys.readouterr().err


def test_names_cannot_steer_the_terminal(saved, capsys) -> None:
    """Control characters in names are written out."""
    finding = Finding(
        finding="vanishing", layer="\x1b[2Jevil\n", first_step=1, last_step=20, message="\x1b]0;title\x07"
    )
    main(["show", saved("run.parquet", names="\x1b[31m{}\n".format, findings=(finding,))])
    assert "\x1b" not in capsys.readouterr().out


def test_unknown_commands_exit_2(capsys) -> None:
    """A typing error gets the usage and status 2."""
    with pytest.raises(SystemExit) as caught:
        main(["shwo", "run.csv"])
    assert caught.value.code == FAILED


# -- what is imported --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["show", "report", "compare"])
def test_looking_at_files_loads_no_framework(command: str, saved, tmp_path: Path) -> None:
    """Commands that need no model import neither Keras nor a backend, and the two others' modules stay unloaded."""
    code = "import sys; from keras_gradwatch.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    path = saved()
    more = {"compare": [path], "report": ["-o", str(tmp_path / "run.html")]}.get(command, [])
    loaded = {name.partition(".")[0] for name in run_python(code, command, path, *more).split()}
    assert "keras_gradwatch" in loaded
    assert loaded.isdisjoint({"keras", "tensorflow", "jax", "torch"})


def test_help_loads_nothing_large() -> None:
    """Help and errors of usage answer without pandas."""
    code = "import sys, keras_gradwatch.cli; print(*sys.modules)"
    assert {"numpy", "pandas", "matplotlib"}.isdisjoint(run_python(code).split())


def test_the_module_runs_as_a_command() -> None:
    """python -m keras_gradwatch is the command."""
    command = [sys.executable, "-m", "keras_gradwatch", "--version"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("keras-gradwatch ")


# -- with a model ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, data and things that look like them."""
    import keras

    folder = tmp_path_factory.mktemp("models")

    def save(name: str, *layers: keras.layers.Layer, compiled: bool = True) -> None:
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        if compiled:
            model.compile("sgd", "mse")
        model.save(folder / name)

    save("right.keras", keras.layers.Dense(3, activation="tanh"))
    save("lambda.keras", keras.layers.Lambda(lambda x: 2 * x))
    save("uncompiled.keras", compiled=False)
    (folder / "broken.keras").write_bytes(b"no model")
    random = np.random.default_rng(0)
    x, y = random.normal(size=(20, 4)).astype("float32"), random.normal(size=(20, 1)).astype("float32")
    np.savez(folder / "data.npz", x=x, y=y)
    np.savez(folder / "other.npz", z=x)
    np.savez(folder / "pickled.npz", x=np.array([{}], dtype=object), y=y)
    (folder / "broken.npz").write_bytes(b"no arrays")
    with zipfile.ZipFile(folder / "absurd.npz", "w") as archive:
        header = b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '<f8', 'fortran_order': False, 'shape': (999999999999,), }"
        archive.writestr("x.npy", header.ljust(127) + b"\n")
    return folder


def test_a_right_model_passes(folder: Path, capsys) -> None:
    """The check of a saved model certifies every weight and the input."""
    assert main(["check", str(folder / "right.keras"), "--data", str(folder / "data.npz"), "--json"]) == WELL
    content = json.loads(capsys.readouterr().out)
    assert content["verdict"] == "ok"
    assert [row["check"] for row in content["tensors"]] == ["ok"] * 5


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        ("lambda.keras", "data.npz", "Lambda"),
        ("broken.keras", "data.npz", "Could not load"),
        ("uncompiled.keras", "data.npz", "not compiled with a loss"),
        ("right.keras", "other.npz", "an array 'z'"),
        ("right.keras", "pickled.npz", "allow_pickle"),
        ("right.keras", "broken.npz", "no data for a check"),
        ("right.keras", "absurd.npz", "no data for a check"),
        ("missing.keras", "data.npz", "No such file"),
        ("right.keras", "missing.npz", "No such file"),
    ],
)
def test_hostile_models_and_data_exit_2(model: str, data: str, words: str, folder: Path, capsys) -> None:
    """A model with code in it, a pickle, an absurd shape: refused with the reason, nothing is run."""
    assert main(["check", str(folder / model), "--data", str(folder / data)]) == FAILED
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo_finds_its_planted_fault(tmp_path: Path, capsys) -> None:
    """The demo names the wrong layer, and leaves a history and a report that can be looked at again."""
    assert main(["demo", "-o", str(tmp_path / "demo")]) == WELL
    assert "layer scale (WrongScale)" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "demo" / "demo.csv")]) == FOUND
    assert "scale" in (tmp_path / "demo" / "demo.html").read_text("utf-8")
