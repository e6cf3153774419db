"""The arrows of the house (docs/architecture.md): no room looks back, and below the wall nothing knows Keras."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import keras_gradwatch

PACKAGE = Path(keras_gradwatch.__file__).parent
BACKENDS = ("tensorflow", "jax", "torch")
FRAMEWORKS = ("keras", *BACKENDS)

#: Rooms that may import Keras. A module that is not named here is below the wall.
# ``cli`` and ``__main__`` are doors beside it: two commands go up, and tests/test_cli.py holds the others below.
ABOVE_THE_WALL = (
    "actions", "activations", "blame", "callback", "capture", "checks", "cli", "demo", "fallback", "incidents",
    "jacobian", "replays",
    "model_files", "optimizers", "probe", "run", "shadow", "states", "suspects",
    "testing", "verdicts", "backends", "__main__",
)  # fmt: skip


def modules() -> dict[str, Path]:
    """Dotted name inside the package, such as ``sinks.parquet``, to file; a folder goes by its own name."""
    files = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): PACKAGE / path for path in files}


MODULES = {name: path for name, path in modules().items() if name != "__init__"}
BELOW_THE_WALL = [name for name in MODULES if name.partition(".")[0] not in ABOVE_THE_WALL]


def imported(path: Path) -> set[str]:
    """Every module imported anywhere in a file, within functions and under TYPE_CHECKING too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update(f"{_origin(node, path)}.{alias.name}" for alias in node.names)
    return found


def _origin(node: ast.ImportFrom, path: Path) -> str:
    """Absolute name of the module that ``from … import`` reads."""
    if node.level == 0:
        return str(node.module)
    folders = ("keras_gradwatch", *path.relative_to(PACKAGE).parent.parts)
    package = folders[: len(folders) - node.level + 1]
    return ".".join([*package, *filter(None, [node.module])])


def rooms(path: Path) -> set[str]:
    """The modules of this package that a file imports."""
    return {room for name in imported(path) if (room := _room(name)) is not None}


def _room(name: str) -> str | None:
    package, _, inner = name.partition(".")
    if package != "keras_gradwatch":
        return None
    candidates = (keras_gradwatch._MODULES.get(inner, inner), inner.rpartition(".")[0])
    return next((candidate for candidate in candidates if candidate in MODULES), None)


def roots(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def strings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.parametrize("name", BELOW_THE_WALL)
def test_below_the_wall_nothing_imports_a_framework(name: str) -> None:
    """A module below the wall imports no framework, not even inside a function."""
    assert roots(MODULES[name]).isdisjoint(FRAMEWORKS)


@pytest.mark.parametrize("name", BELOW_THE_WALL)
def test_below_the_wall_nothing_looks_up(name: str) -> None:
    """A module below the wall imports only modules below the wall."""
    assert rooms(MODULES[name]) <= set(BELOW_THE_WALL)


def test_no_room_looks_back() -> None:
    """The rooms can be put in an order in which each one imports only those before it."""
    tuple(graphlib.TopologicalSorter({name: rooms(path) for name, path in MODULES.items()}).static_order())


@pytest.mark.parametrize("name", ["records", "_optional"])
def test_the_lowest_rooms_import_nothing_of_ours(name: str) -> None:
    """Facts and optional imports stand on the ground."""
    assert rooms(MODULES[name]) == set()


@pytest.mark.parametrize("name", [name for name in MODULES if name.partition(".")[0] != "backends"])
def test_backends_are_named_in_their_folder_only(name: str) -> None:
    """Outside backends/ no module imports a backend or compares with its name."""
    assert roots(MODULES[name]).isdisjoint(BACKENDS)
    assert set(strings(MODULES[name])).isdisjoint(BACKENDS)


def test_the_reader_of_imports_sees_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted import is found wherever it hides, so that the tests above are awake."""
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    planted = tmp_path / "sinks" / "planted.py"
    planted.parent.mkdir()
    planted.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import torch.nn\n"
        "def f():\n    from keras import ops\n    from keras_gradwatch import errors\n"
        "    from keras_gradwatch.records import Finding\n    from keras_gradwatch import read_history\n"
        "    from ..schedules import parse_check_schedule\n    from .. import schema\n    return 'jax'\n"
    )
    assert roots(planted) == {"typing", "torch", "keras", "keras_gradwatch"}
    assert rooms(planted) == {"errors", "history", "records", "schedules", "schema"}
    assert "jax" in set(strings(planted))


def test_importing_the_package_loads_no_framework() -> None:
    """The import is instant: neither Keras, nor a backend, nor pandas."""
    code = "import sys, keras_gradwatch; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = run_python(code).split()
    assert set(loaded).isdisjoint({*FRAMEWORKS, "numpy", "pandas"})


def test_below_the_wall_everything_runs_without_a_framework() -> None:
    """All modules below the wall together load no framework, so reading a history answers at once."""
    imports = "\n".join(f"import keras_gradwatch.{name}" for name in BELOW_THE_WALL if name != "__main__")
    loaded = run_python(f"import sys\n{imports}\nprint(*{{name.partition('.')[0] for name in sys.modules}})").split()
    assert "numpy" in loaded
    assert set(loaded).isdisjoint(FRAMEWORKS)


def test_dir_lists_the_public_names_before_they_are_loaded() -> None:
    """Completion in a notebook shows every public name right after the import."""
    listed = run_python("import keras_gradwatch; print(*dir(keras_gradwatch))").split()
    assert set(keras_gradwatch.__all__) <= set(listed)
    assert "__version__" in listed


@pytest.mark.parametrize("name", keras_gradwatch.__all__)
def test_every_public_name_loads(name: str) -> None:
    """Each public name is there, under its own name, and stays the same object."""
    value = getattr(keras_gradwatch, name)
    assert value.__name__ == name
    assert getattr(keras_gradwatch, name) is value


def test_unknown_name_is_an_attribute_error() -> None:
    """A typing error gets the usual answer, so that hasattr works."""
    with pytest.raises(AttributeError, match="module 'keras_gradwatch' has no attribute 'GradWach'"):
        keras_gradwatch.GradWach  # noqa: B018
