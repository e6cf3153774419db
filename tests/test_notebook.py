import re
from collections.abc import Callable
from html.parser import HTMLParser

import pandas as pd

from keras_gradwatch.account import account_of
from keras_gradwatch.history import History
from keras_gradwatch.notebook import check_html, run_html
from keras_gradwatch.records import CheckResult, Culprit, Finding, TensorCheck, TensorInfo

VOID = ("br",)


class Reader(HTMLParser):
    """Reads a piece of HTML: its words, its tags, and whether they close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def check(**verdicts: str) -> CheckResult:
    names = ("a", "b", "c")
    tensors = tuple(TensorInfo(layer=name, tensor=name, role="weight", depth=0, shape=(2,)) for name in names)
    rows = tuple(TensorCheck(tensor=n, verdict=verdicts.get(n, "ok"), error=1e-9, bar=1e-7) for n in names)
    culprits = (Culprit(layer="b", layer_class="Scale", factor=1.1, error=0.1, bar=1e-7),) if verdicts else ()
    return CheckResult(tensors=tensors, checks=rows, culprits=culprits)


def test_a_healthy_check_says_so_first() -> None:
    """The verdict comes first, with how sure it is."""
    text = Reader(check_html(check())).text
    assert text.startswith("✓ ok: the gradients are the slopes of the loss all 3 weights are right: worst error 1e-09")


def test_a_wrong_layer_is_named_first() -> None:
    """The culprit stands in the banner, and the tensor it spoils on top of the table."""
    text = Reader(check_html(check(b="mismatch"))).text
    assert text.startswith("✗ mismatch: b (Scale)")
    assert "its backward gives 1.10 × the true slope" in text
    assert text.index("✗ b b mismatch") < text.index("✓ a a ok")


def test_a_check_of_many_tensors_stays_small() -> None:
    """Of thousands of tensors those that are wrong are shown, and how many are not."""
    tensors = tuple(TensorInfo(layer=f"l{k}", tensor=f"t{k}", role="weight", depth=k, shape=(2,)) for k in range(5000))
    rows = tuple(TensorCheck(tensor=t.tensor, verdict="mismatch" if t.depth == 4321 else "ok") for t in tensors)
    page = check_html(CheckResult(tensors=tensors, checks=rows))
    assert len(page) < 300_000
    assert "t4321" in page
    assert "4,800 that are right are left out" in page


def test_a_check_of_nothing_is_no_error() -> None:
    """An empty check shows as inconclusive."""
    assert "inconclusive" in Reader(check_html(CheckResult(tensors=(), checks=()))).text


def test_a_run_shows_findings_with_advice(make_run: Callable[..., pd.DataFrame]) -> None:
    """What, where, why and what to try, the verdict first."""
    finding = Finding(
        finding="vanishing", layer="dense_0", first_step=1, last_step=20, message="falls", advice="use relu",
        tensors=("model/dense_0/kernel",),
    )  # fmt: skip
    text = Reader(run_html(account_of(make_run(findings=(finding,))))).text
    assert text.startswith("! vanishing: layer dense_0 (Dense), since step 1 Gradients fade on their way")
    assert text.index("Why: falls") < text.index("Try: use relu") < text.index("all 6 weights and the input are right")


def test_a_healthy_run_is_green(make_run: Callable[..., pd.DataFrame]) -> None:
    """A run without findings says so first."""
    assert Reader(run_html(account_of(make_run()))).text.startswith(
        "✓ No findings all 6 weights and the input are right"
    )


def test_before_training_it_says_what_to_do() -> None:
    """A callback that has seen nothing tells how to use it."""
    assert "Call model.fit" in run_html(account_of(History((), {}).to_frame()))


def test_names_are_escaped(make_run: Callable[..., pd.DataFrame]) -> None:
    """Names and messages with HTML in them stay text."""
    evil = "<script>alert(1)</script>"
    finding = Finding(finding=evil, layer=evil, first_step=1, last_step=20, message=evil, advice=evil)
    run = run_html(account_of(make_run(names=lambda i: f"{evil}{i}", findings=(finding,), model=evil)))
    tensor = TensorInfo(layer=evil, tensor=evil, role="weight", depth=0, shape=(1,), layer_class=evil)
    result = CheckResult(
        tensors=(tensor,), checks=(TensorCheck(tensor=evil, verdict="mismatch", reason=evil),),
        culprits=(Culprit(layer=evil, layer_class=evil, detail=evil),), notes=(evil,),
    )  # fmt: skip
    assert "script" not in Reader(run).tags | Reader(check_html(result)).tags
    assert "<script>" in Reader(run).text
