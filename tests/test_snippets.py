"""Every Python snippet of the README and the documentation runs, each page from top to bottom, as a reader would."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_SNIPPETS = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8")]
#: A snippet that cannot run says so, and why, in a comment before it.
NOT_RUN = re.compile(r"<!-- not run: .+ -->\n+$")


class MyLayer(layers.Layer):
    """A layer of the reader's own."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(name="scale", shape=(shape[-1],), initializer="ones")

    def call(self, inputs: Any) -> Any:
        return inputs * self.scale


def snippets(page: Path) -> Iterator[tuple[int, str]]:
    """Line and code of the snippets of a page that run."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if not NOT_RUN.search(text[: match.start()]):
            yield text[: match.start()].count("\n") + 2, match[1]


def readers_names() -> dict[str, Any]:
    """What the pages take for granted: a model, data, a layer, a function and a run that was watched."""
    from keras_gradwatch import GradWatch

    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).standard_normal((64, 6)).astype("float32")
    y = (x[:, :1] > 0).astype("float32")
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(4, activation="tanh", name="quantizer"), layers.Dense(1, name="logit")]
    )
    model.compile(optimizer="sgd", loss=keras.losses.BinaryCrossentropy(from_logits=True))
    watch = GradWatch(check_freq="start", verbose=0)
    model.fit(x, y, verbose=0, callbacks=[watch])
    return {
        "model": model, "x": x, "y": y, "images": x, "texts": x, "keras": keras, "np": np, "watch": watch,
        "MyLayer": MyLayer, "f": lambda z: z * z, "my_function": lambda z, weights: keras.ops.matmul(z, weights["w"]),
        "w": np.ones((6, 2), "float32"), "__name__": "snippet",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=lambda page: page.name)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippets of a page run one after the other, in an empty folder, and so do the tests that they define."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names = readers_names()
    for line, code in snippets(page):
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
        for name in [name for name in names if name.startswith("test_")]:
            names.pop(name)()
    pyplot.close("all")


def test_snippets_that_do_not_run_are_few() -> None:
    """Only snippets of other packages do not run, and the one that replays the reader's own incident."""
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert pages.count("<!-- not run: ") == pages.count("-->\n```python") == 4


def test_a_broken_snippet_would_be_seen(tmp_path: Path) -> None:
    """The reader of snippets finds each of them, with its line, and leaves out those that say why."""
    page = tmp_path / "page.md"
    page.write_text(
        f"a\n\n```python\n1 / 0\n```\n\n<!-- not run: old -->\n```python\n2\n```\n{os.linesep}```text\n3\n```\n"
    )
    assert list(snippets(page)) == [(4, "1 / 0\n")]
