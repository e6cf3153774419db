"""How words are shown: in colour and as wide as the terminal, as a block in a notebook, plain everywhere else."""

from __future__ import annotations

import math
import os
import re
import sys
import textwrap
from html import escape
from typing import TYPE_CHECKING

from keras_gradwatch.records import CheckResult
from keras_gradwatch.summary import MOST_ROWS, VERDICT_MARKS, render_check, rounding_of
from keras_gradwatch.words import WIDTH, short

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

#: What gets which style, in Rich's words: the mark and the word that follows it say how bad a line is.
_STYLES = (
    (r"^\s*✗ \S+", "bold red"),
    (r"^\s*! \S+", "bold yellow"),
    (r"^\s*✓( no findings| ok\b| \w+: no fault)?", "bold green"),
    (r"^\s*\?", "bold magenta"),
    (r"^\s*(try|note):", "bold cyan"),
    (r"(since step|steps?) [\d,–]+$", "dim"),
    (r"^GradWatch\b", "bold"),
)
_TABLE_STYLES = {"✗": "bold red", "?": "magenta", "✓": "green"}
_WHEN = re.compile(r"(since step|steps?) [\d,–]+$")
#: Words with which a paragraph begins.
_BEGINNINGS = ("✗", "!", "✓", "?", "·", "…", "try:", "note:")
_NARROWEST = 40


class DisplayText(str):
    """Text that is plain, but shows in colour when it is printed on a terminal.

    Everything that reads it (``in``, ``splitlines``, ``write`` of a file, f-strings) sees the plain text; only
    ``str()``, and so ``print``, looks at where it goes. ``NO_COLOR`` in the environment keeps it plain.

    Example:
        >>> text = DisplayText("✓ no findings")
        >>> text == "✓ no findings", f"{text}"
        (True, '✓ no findings')
    """

    __slots__ = ()

    def __str__(self) -> str:
        console = terminal()
        return self[:] if console is None else _rendered(console, _coloured(self[:], console.width))

    def __format__(self, specification: str) -> str:
        return format(self[:], specification)

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre-wrap; font-family: monospace">{escape(self[:])}</pre>'


def show_check(result: CheckResult) -> str:
    """A gradient check for ``print``: a table in colour on a terminal, else as :func:`~summary.render_check` has it."""
    console = terminal()
    if console is None:
        return render_check(result)
    words = _coloured(render_check(result, table=False), console.width)
    return _rendered(console, words, *([_table(result)] if 0 < len(result.checks) <= MOST_ROWS else []))


def terminal() -> Console | None:
    """The console behind ``sys.stdout``; ``None`` where colour would be noise: a file, a pipe, ``NO_COLOR``."""
    if "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb" or not _is_terminal():
        return None
    from rich.console import Console  # a tenth of a second: only where it is used

    return Console(file=sys.stdout, highlight=False, markup=False, emoji=False)


def reflowed(text: str, width: int) -> str:
    """Lines that were wrapped at 100 columns, wrapped again for a narrower terminal.

    Args:
        text: lines as :func:`keras_gradwatch.words.wrapped` makes them.
        width: columns there are.

    Returns:
        The same words in the same order, indented as before.

    Example:
        >>> print(reflowed("  ✗ conv: its backward is wrong", 24))
          ✗ conv: its backward
            is wrong
    """
    paragraphs = list[str]()
    before = ""
    for line in text.splitlines():
        if paragraphs and _goes_on(before, line):
            paragraphs[-1] += f" {line.strip()}"
        else:
            paragraphs.append(line)
        before = line
    return "\n".join(line for paragraph in paragraphs for line in _folded(paragraph, max(width, _NARROWEST)))


def _goes_on(line: str, following: str) -> bool:
    """True where a line was broken because the next word did not fit."""
    words = following.split()
    begins = not words or not following.startswith("  ") or words[0] in _BEGINNINGS
    return not begins and not _WHEN.search(line) and len(line) + 1 + len(words[0]) > WIDTH


def _folded(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    line = re.sub(r"(?<=\S) {2,}(?=\S)", "  ", line)  # columns are of no use where they do not fit
    indent = len(line) - len(line.lstrip())
    first = line.split()[0]
    indent += len(first) + 1 if first in _BEGINNINGS else 0
    return textwrap.wrap(line, width, subsequent_indent=" " * indent, break_on_hyphens=False, replace_whitespace=False)


def _is_terminal() -> bool:
    try:
        return sys.stdout.isatty()
    except (AttributeError, ValueError):  # replaced by something that is no file, or closed
        return False


def _coloured(text: str, width: int) -> Text:
    from rich.text import Text

    words = Text(reflowed(text, width) if width < WIDTH else text)
    for pattern, style in _STYLES:
        words.highlight_regex(re.compile(pattern, re.MULTILINE), style)
    return words


def _table(result: CheckResult) -> Table:
    """All tensors, as wide as the terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table("", "tensor", "verdict", header_style="bold", box=None, padding=(0, 2, 0, 0))
    for column in ("error", "bar", "rounding"):
        table.add_column(column, justify="right")
    for check in result.checks:
        style = _TABLE_STYLES.get(VERDICT_MARKS[check.verdict], "")
        numbers = (check.error, check.bar, rounding_of(check))
        cells = (VERDICT_MARKS[check.verdict], short(check.tensor), check.verdict)
        table.add_row(
            *(Text(cell, style) for cell in cells), *("–" if math.isnan(value) else f"{value:.1e}" for value in numbers)
        )
    return table


def _rendered(console: Console, *parts: RenderableType) -> str:
    with console.capture() as capture:
        for part in parts:
            console.print(part, crop=False, overflow="ignore", no_wrap=True)
    return capture.get().rstrip("\n")
