import json

import pytest

from keras_gradwatch._optional import require


def test_installed_module_is_returned() -> None:
    """An installed module comes back as it is."""
    assert require("json", "report") is json


@pytest.mark.parametrize("module", ["no_such_package", "no_such_package.part.deeper"])
def test_missing_package_names_its_extra(module: str) -> None:
    """A missing package, or one of its submodules, is answered with the command that installs it."""
    with pytest.raises(ModuleNotFoundError, match=r'pip install "keras-gradwatch\[parquet\]"') as caught:
        require(module, "parquet")
    assert module in str(caught.value)
    assert caught.value.name == "no_such_package"


def test_missing_submodule_of_an_installed_package_names_its_extra() -> None:
    """An installed package that is too old to have the submodule is answered with the extra, too."""
    with pytest.raises(ModuleNotFoundError, match=r"json\.no_such_part.*keras-gradwatch\[parquet\]"):
        require("json.no_such_part", "parquet")


def test_broken_package_keeps_its_own_error(tmp_path, monkeypatch) -> None:
    """A package that is there but misses something of its own is not blamed on the extra."""
    (tmp_path / "broken_package_a.py").write_text("import broken_package_a_needs_this")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="broken_package_a_needs_this") as caught:
        require("broken_package_a", "parquet")
    assert "keras-gradwatch" not in str(caught.value)
