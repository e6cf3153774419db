import ast
import doctest
import importlib
import os
import re
import tomllib
from pathlib import Path

import pytest

import keras_gradwatch
from keras_gradwatch import records, schema

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path.relative_to(ROOT) for path in (ROOT / "keras_gradwatch").rglob("*.py"))
TESTS = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Adapters for other backends than the one these tests run on.
OTHERS = {"tensorflow", "jax", "torch"} - {os.environ["KERAS_BACKEND"]}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def table_names(text: str) -> set[str]:
    """First cells of the Markdown tables in a text, where they are code."""
    return set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))


def dotted(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("program", ["examples/quickstart.py", "pytest"])
def test_readme_has_each_command_once_in_one_line(program: str) -> None:
    """The two commands stand in the README once, as one line each; the CI script finds them there."""
    lines = re.findall(rf"^python3 -m venv .*{program}.*$", README, re.MULTILINE)
    assert len(lines) == 1
    assert lines[0].startswith('python3 -m venv .venv && .venv/bin/pip install ".[')


def test_ci_takes_the_commands_from_the_readme() -> None:
    """The CI script spells out neither command itself, so it cannot run another one than the README tells."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert 'eval "$(readme_command examples/quickstart.py)"' in script
    assert 'eval "$(readme_command pytest)"' in script


def test_extras_named_in_the_readme_exist() -> None:
    """Every extra in an install command of the README is one of the package."""
    named = {extra for group in re.findall(r"\[([a-z,-]+)\]\"", README) for extra in group.split(",")}
    assert named
    assert named <= set(EXTRAS)


def test_every_finding_is_explained_in_the_readme() -> None:
    """The README's table holds the findings of the package, all of them and no others."""
    assert table_names(README) == set(records.FINDINGS)


def test_history_page_holds_the_schema() -> None:
    """The table of columns in the documentation is the one the code defines."""
    assert schema.schema_markdown() in (ROOT / "docs" / "history.md").read_text(encoding="utf-8")


def test_every_verdict_is_explained() -> None:
    """The documentation holds the verdicts of the check, all of them and no others."""
    page = (ROOT / "docs" / "history.md").read_text(encoding="utf-8")
    assert table_names(page.partition("## Verdicts")[2]) == set(records.VERDICTS)


def test_every_public_name_is_in_the_reference() -> None:
    """The page of the API names everything that the package offers at its top."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\.\. auto\w+:: keras_gradwatch\.(\w+)$", page, re.MULTILINE))
    assert set(keras_gradwatch.__all__) - named == set(), "add these names to docs/api.md"


def test_every_page_is_in_a_table_of_contents() -> None:
    """No page of the documentation is left out of the index."""
    folder = ROOT / "docs"
    listed = set(re.findall(r"^([a-z-]+)$", (folder / "index.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert {path.stem for path in folder.glob("*.md")} - {"index"} - listed == set()


def test_every_room_is_on_the_architecture_page() -> None:
    """The picture of the house names the rooms there are, all of them and no others."""
    rooms = {path.parts[1].removesuffix(".py") for path in SOURCES} - {"__init__", "__main__"}
    page = table_names((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert rooms - page == set(), "add these rooms to the tables of docs/architecture.md"
    assert page - rooms == set(), "docs/architecture.md names rooms that are not there"


def test_links_between_pages_lead_somewhere() -> None:
    """Every relative link in the pages names a file."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    links = [
        (page, link) for page in pages for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text("utf-8"))
    ]
    assert links
    assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("path", [path for path in SOURCES if path.stem.partition("_")[0] not in OTHERS], ids=dotted)
def test_examples_in_docstrings_run(path: Path) -> None:
    """The examples in docstrings give what they say."""
    module = importlib.import_module(dotted(path))
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).failed == 0


@pytest.mark.parametrize("path", TESTS, ids=str)
def test_every_test_states_its_fact(path: Path) -> None:
    """Each test has a docstring."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    assert [function.name for function in functions if not ast.get_docstring(function)] == []
