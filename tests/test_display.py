import io
import re
import sys
from collections.abc import Callable

import pytest

from keras_gradwatch.display import DisplayText, reflowed, show_check
from keras_gradwatch.records import CheckResult, TensorCheck, TensorInfo
from keras_gradwatch.summary import render_check
from keras_gradwatch.words import wrapped

SUMMARY = DisplayText("GradWatch   9 steps\n✗ mismatch    layer scale (Scale)     since step 1\n    wrong\n✓ 3 weights")
KERNEL = TensorInfo(layer="dense", tensor="dense/kernel", role="weight", depth=0, shape=(2, 2))
BIAS = TensorInfo(layer="dense", tensor="[red]bias[/red]", role="weight", depth=0, shape=(2,))
CHECK = CheckResult(
    tensors=(KERNEL, BIAS),
    checks=(
        TensorCheck(tensor=KERNEL.tensor, verdict="mismatch", error=0.1, bar=1e-7, factor=1.1),
        TensorCheck(tensor=BIAS.tensor, verdict="ok", error=1e-9, bar=1e-7),
    ),
)


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


Printed = Callable[..., str]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Printed:
    """What a stream gets when something is printed on it."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def onto(stream: io.StringIO, *things: object) -> str:
        # Not in the fixture's own body: pytest puts its capture back between that and the test.
        with monkeypatch.context() as context:
            context.setattr(sys, "stdout", stream)
            for thing in things:
                print(thing() if callable(thing) else thing)
        return stream.getvalue()

    return onto


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_a_terminal_shows_colours(printed: Printed) -> None:
    """On a terminal the culprit's line is red and bold, and the words are the same."""
    shown = printed(Terminal(), SUMMARY)
    assert "\x1b[1;31m✗ mismatch\x1b[0m" in shown
    assert without_colours(shown) == f"{SUMMARY}\n"


def test_a_file_gets_plain_text(printed: Printed) -> None:
    """Printed into something that is no terminal, there are no colours."""
    shown = printed(io.StringIO(), SUMMARY, lambda: show_check(CHECK))
    assert shown == f"{SUMMARY}\n{render_check(CHECK)}\n"


def test_no_color_is_heeded(printed: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR keeps a terminal plain."""
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(Terminal(), SUMMARY) == f"{SUMMARY}\n"


def test_whoever_reads_the_text_sees_no_colours(printed: Printed) -> None:
    """What is not printed stays plain, also while there is a terminal."""
    shown = printed(Terminal(), lambda: f"{SUMMARY}{SUMMARY[:]}{'|'.join(SUMMARY.splitlines())}")
    assert "\x1b" not in shown
    assert "\x1b" in printed(Terminal(), lambda: str(SUMMARY))


def test_a_narrow_terminal_wraps_again() -> None:
    """Lines wrapped for 100 columns are joined and wrapped for fewer; no word is lost, and paragraphs stay apart."""
    words = " ".join(f"word{k}" for k in range(60))
    lines = [*wrapped(words, first="  ✗ ", rest="    "), *wrapped(words, first="    try: ", rest="         "), "✓ end"]
    narrow = reflowed("\n".join(lines), 60).splitlines()
    assert max(map(len, narrow)) <= 60
    assert " ".join(" ".join(narrow).split()) == f"✗ {words} try: {words} ✓ end"
    assert [line[:9] for line in narrow if "try:" in line or "✓" in line] == ["    try: ", "✓ end"]
    assert all(len(line) > 45 for line in narrow if line.startswith("    word") and "word59" not in line)


def test_a_check_is_a_table_on_a_terminal(printed: Printed) -> None:
    """A tensor that is wrong stands in red in the table; its name is not taken for markup."""
    rows = without_colours(printed(Terminal(), lambda: show_check(CHECK))).splitlines()
    assert any(re.match(r"✗ +dense/kernel +mismatch +1.0e-01 +1.0e-07 +–", row) for row in rows)
    assert any(re.match(r"✓ +\[red\]bias\[/red\] +ok", row) for row in rows)
    assert "1.10 × the true slope" in rows[1]
