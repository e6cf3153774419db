import base64
import hashlib
import html.parser
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from keras_gradwatch.history import History
from keras_gradwatch.records import FINDINGS, Finding
from keras_gradwatch.report import MEANINGS, render_report, write_report

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\n\"'&{{7*7}}"
MISMATCH = Finding(
    finding="mismatch", layer="dense_1", first_step=1, last_step=11, severity="error", value=0.1, limit=1e-6,
    message="its backward gives 1.10 × the true slope", advice="compare its gradient with its call",
    tensors=("model/dense_0/kernel",),
)  # fmt: skip
NONFINITE = Finding(
    finding="nonfinite", layer="dense_2", first_step=12, last_step=20, severity="error", message="became NaN",
    tensors=("model/dense_2/kernel",),
)  # fmt: skip


class Page(html.parser.HTMLParser):
    """Tags, attributes and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self._silent = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._silent = tag in ("script", "style")

    def handle_endtag(self, tag):
        self._silent = False

    def handle_data(self, data):
        self.text += "" if self._silent else data


@pytest.fixture(scope="module")
def usual_page(request: pytest.FixtureRequest) -> str:
    """The page of a healthy run, rendered once."""
    return render_report(request.getfixturevalue("make_run")())


def test_the_verdict_comes_first(make_run: Callable[..., pd.DataFrame]) -> None:
    """The banner says what, where and since when; below stand why and what to try."""
    text = Page(render_report(make_run(wrong=1, findings=(MISMATCH, NONFINITE)))).text
    places = [
        text.index(words)
        for words in (
            "mismatch: layer dense_1 (Dense), since step 1",
            "and 1 more finding, below",
            "Why: its backward gives 1.10 × the true slope",
            "Try: compare its gradient with its call",
            "How sure we are",
            "Pictures",
            "All tensors",
        )
    ]
    assert places == sorted(places)


def test_a_healthy_run_is_told_with_a_number(usual_page: str) -> None:
    """Without findings the banner is green and says how sure that is."""
    assert '<header class="banner good">' in usual_page
    assert "all 6 weights and the input are right: worst error 1e-09 (bar 1e-06)" in usual_page


def test_a_run_without_a_check_is_not_called_healthy(make_run) -> None:
    """Nothing found and nothing checked is no green banner."""
    page = render_report(make_run(checks=False))
    assert '<header class="banner info">' in page
    assert "nothing here says whether the gradients are right" in page


def test_wrong_gradients_without_a_finding_are_an_error(make_run) -> None:
    """With rules switched off, the checks still decide the banner."""
    assert '<header class="banner error">' in render_report(make_run(wrong=1))


def test_an_empty_history_has_a_page() -> None:
    """Before the first step there is a page, too."""
    assert "no gradient was tracked" in render_report(History((), {}).to_frame())


def test_nothing_is_loaded(usual_page: str) -> None:
    """The page refers to nothing outside of itself, and its policy forbids it."""
    page = Page(usual_page)
    links = [value for name, value in page.attributes if name in ("src", "href", "xlink:href", "action", "srcset")]
    assert [link for link in links if not link.startswith(("#", "data:image/png;base64,"))] == []
    assert any(value.startswith("default-src 'none'") for name, value in page.attributes if name == "content")
    assert not {"link", "iframe", "object", "embed"} & set(page.tags)


def test_everything_is_escaped(make_run) -> None:
    """Names, messages and settings with HTML add no tag and no attribute, and are shown as they are."""
    finding = Finding(
        finding=HOSTILE, layer=HOSTILE, first_step=3, last_step=4, message=HOSTILE, advice=HOSTILE, tensors=(HOSTILE,)
    )
    tame = Finding(finding="a", layer="b", first_step=3, last_step=4, message="c", advice="d", tensors=("e",))
    usual = Page(render_report(make_run(findings=(tame,), notes=["note"])))
    page = Page(
        render_report(make_run(names=lambda i: f"{HOSTILE}{i}", findings=(finding,), notes=[HOSTILE], model=HOSTILE))
    )
    assert sorted(page.tags) == sorted(usual.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "<img src=x onerror=alert(1)>" in page.text
    assert "{{7*7}}" in page.text  # and not 49


def test_only_the_page_s_own_script_is_allowed(usual_page: str) -> None:
    """The policy holds the hash of the one script there is, so a smuggled one would not run."""
    (script,) = re.findall(r"<script>(.*?)</script>", usual_page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(value for name, value in Page(usual_page).attributes if name == "content" and "script-src" in value)
    assert f"script-src 'sha256-{digest}'" in policy


def test_ids_are_unique(usual_page: str) -> None:
    """The pictures share a page without sharing identifiers."""
    ids = [value for name, value in Page(usual_page).attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_pictures_take_their_ink_from_the_page(usual_page: str) -> None:
    """Text and axes have the page's colour, so that they can be read in the dark."""
    assert usual_page.count("<svg") == 6
    assert "currentColor" in usual_page
    assert "#010203" not in usual_page


def test_the_steps_before_an_event_are_shown(make_run) -> None:
    """Around the first broken step stand the eight before it and two after it."""
    page = render_report(make_run(broken_at=12, findings=(NONFINITE,)))
    events = page.partition('id="events"')[2].partition('id="tensors"')[0]
    steps = re.findall(r"<tr[^>]*><td>(\d+)</td>", events)
    assert steps == [str(step) for step in range(4, 15)]
    assert re.findall(r'<tr class="event"><td>(\d+)</td>', events) == ["12"]
    assert "NaN or Inf" in events


def test_tensors_stand_in_a_table(make_run) -> None:
    """Every tensor has a row with numbers that sort, those with a finding or another verdict than ok are marked."""
    page = render_report(make_run(wrong=1, findings=(MISMATCH,)))
    body = page.partition('id="table"')[2].partition("</tbody>")[0]
    rows = re.findall(r"<tr( data-notable)?>(.*?)</tr>", body.partition("<tbody>")[2], re.DOTALL)
    assert len(rows) == 7
    assert [bool(notable) for notable, _ in rows] == [False, True, False, False, False, False, False]
    assert 'data-value="0.1"' in rows[1][1]


def test_a_model_of_many_tensors_keeps_the_page_small(make_run) -> None:
    """Of more than 3,000 tensors the notable ones stay, and the page says how many were left out."""
    page = render_report(make_run(layers=1_700, steps=2, wrong=3_001))
    assert "401 unremarkable tensors are left out" in page
    assert page.count("data-notable>") == 1
    assert len(page) < 3_000_000


def test_three_hundred_tensors_over_many_steps_stay_below_three_megabytes(make_run) -> None:
    """The size depends on tensors, not on steps."""
    assert len(render_report(make_run(layers=150, steps=1_000)).encode()) < 3_000_000


def test_every_finding_has_a_meaning() -> None:
    """The page explains all findings of the package and no others."""
    assert set(MEANINGS) == set(FINDINGS)


def test_a_report_is_written_in_utf_8(make_run, tmp_path: Path) -> None:
    """The file holds what was rendered, whatever the platform's encoding; lone surrogates do no harm."""
    frame = make_run(names="層{}".format, model="\ud800")
    path = write_report(frame, tmp_path / "run.html")
    assert path.read_text("utf-8") == render_report(frame)
    assert "層0" in path.read_text("utf-8")


# -- in a browser ------------------------------------------------------------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=4000",
    "--dump-dom",
]


def browse(path: Path, anchor: str, profile: Path) -> tuple[str, str]:
    """The page as the browser has it after the script ran, and what the browser logged."""
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={profile}", f"{path.as_uri()}#{anchor}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env={**os.environ, "LANG": "C.UTF-8"}
    )
    return done.stdout, done.stderr


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")
@pytest.mark.slow
def test_sorting_and_filtering_work_in_a_browser(make_run, tmp_path: Path) -> None:
    """Opened by its file name, the page sorts by a clicked heading, filters by words, and logs no error."""
    frame = make_run(layers=12, findings=(MISMATCH,), names=lambda i: f"<b>layer</b>_{i}")
    path = write_report(frame, tmp_path / "run.html")
    dom, log = browse(path, "sort=rms&filter=kernel", tmp_path / "profile")
    assert "CONSOLE" not in log, log
    body = dom.partition('id="table"')[2].partition("<tbody>")[2].partition("</tbody>")[0]
    rows = re.findall(r"<tr([^>]*)>(.*?)</tr>", body, re.DOTALL)
    shown = [cells for attributes, cells in rows if "hidden" not in attributes]
    layers = [re.search(r"layer&lt;/b&gt;_(\d+)", cells).group(1) for cells in shown]
    assert layers == [str(i) for i in reversed(range(12))]  # the strongest gradient, nearest the loss, comes first
    assert "12 of 25 shown" in dom
    assert re.findall(r'data-key="(\w+)"[^>]*aria-sort="(\w+)"', dom) == [("rms", "descending")]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")
@pytest.mark.slow
def test_a_smuggled_script_does_not_run_in_a_browser(usual_page: str, tmp_path: Path) -> None:
    """Were anything not escaped, the policy would still keep it from running; this one is planted past the escaping."""
    page = usual_page.replace("</main>", "<script>document.title = 'owned'</script></main>")
    (tmp_path / "run.html").write_text(page, encoding="utf-8")
    dom, log = browse(tmp_path / "run.html", "", tmp_path / "profile")
    assert "<title>owned" not in dom
    assert "Content Security Policy" in log


def test_medians_in_the_table_are_those_of_the_run(make_run) -> None:
    """The numbers of a row are the medians that pandas gives."""
    frame = make_run()
    expected = frame[frame["tensor"] == "model/dense_1/bias"]["grad_rms"].median()
    body = render_report(frame).partition('id="table"')[2]
    values = [float(value) for value in re.findall(r'data-value="([\d.e+-]+)"', body)]
    assert np.isclose(values, expected, rtol=1e-5).any()
