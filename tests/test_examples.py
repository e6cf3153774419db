"""The examples run, and say what their readers come for."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}

#: What each example must say, in this order.
SAID = {
    "quickstart": ["✓ no findings", "✗ mismatch", "scale (Scale)", "! vanishing", "✗ nonfinite", "history of run 1"],
    "fixing_a_vanishing_net": ["! vanishing", "! dead_units", "✓ no findings", "accuracy: "],
    "gan": ["looks like a gradient reversal", "✓ no findings", "different on purpose", "who learns faster"],
    "transformer": ["✗ nonfinite", "attention_1 (Attention)", "✓ no findings", "slowest to learn", "ok=True"],
    "text_lstm": ["! vanishing   rnn", "try: LSTM", "✓ no findings", "of a guess"],
    "tf_data_at_scale": ["✓ no findings", "training took", "steps are in stream.csv", "gradient rms by layer"],
}
#: Examples that are tests themselves.
TESTS = {"custom_layer_test"}


def test_every_example_is_tested() -> None:
    """No example is forgotten here."""
    assert {path.stem for path in FOLDER.glob("*.py")} == set(SAID) | TESTS


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_example_says_what_it_shows(name: str, tmp_path: Path) -> None:
    """The example runs to its end and says, in order, what it is there to show."""
    if name == "tf_data_at_scale" and importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tf.data comes with TensorFlow")
    arguments = [str(tmp_path)] if name in ("quickstart", "tf_data_at_scale") else []
    run = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), *arguments], cwd=tmp_path, env=ENVIRONMENT, capture_output=True,
        text=True, timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3_000:]
    rest = run.stdout
    for words in SAID[name]:
        _, found, rest = rest.partition(words)
        assert found, f"{words!r} is missing or too early in:\n{run.stdout}"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TESTS))
def test_example_of_a_test_passes(name: str) -> None:
    """An example that is a test passes as one."""
    command = [sys.executable, "-m", "pytest", "-q", "--timeout=250", str(FOLDER / f"{name}.py")]
    run = subprocess.run(command, cwd=FOLDER.parent, env=ENVIRONMENT, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout[-3_000:]
