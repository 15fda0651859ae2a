"""The report in a real browser: nothing leaves it, nothing fails, nothing overflows, and keys reach every token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.cli.report import run_report
from tests.support import chromium, report_sample
from tests.support.chromium import Page

CHROMIUM = chromium.found()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]
PIECES = [
    "</script><script>window.hacked = 1</script>",
    '"><img src=http://127.0.0.1:9/x onerror="window.hacked = 1">',
    "שלום עולם ",
    "\u202egnorw\u202c ",
    "👩\u200d",
    "💻 ",
    "w" * 300,
    "\n",
    "",
]


def hostile(folder: Path) -> None:
    """The answers of a folder once more, with pieces that would break a careless page; one has 10,000 tokens."""
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    for count in (len(PIECES), 10_000):
        pieces = [PIECES[n % len(PIECES)] for n in range(count)]
        tokens = {"token_ids": list(range(count)), "sources": ["accepted"] * count, "pieces": pieces}
        shown = {**lines[0], **tokens, "id": f"<b>hostile</b> {count} {'x' * 200}", "text": "".join(pieces)}
        lines.append({**shown, "signals": [{"entropy": 0.25}] * count})
    report_sample.write_lines(folder / "results.jsonl", lines)


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    report_sample.small(folder)
    hostile(folder)
    out = folder / "report.html"
    run_report([str(folder)], str(out))
    return out


@pytest.fixture(scope="session")
def page() -> Iterator[Page]:
    assert CHROMIUM is not None
    with chromium.browsing(CHROMIUM) as page:
        yield page


def tip(page: Page) -> str | None:
    text: str | None = page.evaluate("tip.hidden ? null : tip.innerText")
    return text


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_asked_of_a_network_and_nothing_fails(page: Page, report: Path, width: int, dark: bool) -> None:
    page.open(report, width, dark=dark)
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    page.evaluate("new Promise(done => setTimeout(done, 100))")
    asked = [e["params"]["request"]["url"] for e in page.events if e.get("method") == "Network.requestWillBeSent"]
    assert asked == [report.as_uri()]
    failed = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
    assert [e for e in page.events if e.get("method") in failed] == []
    assert page.evaluate("typeof window.hacked") == "undefined"


@pytest.mark.parametrize("width", [1280, 390, 320])
def test_nothing_overflows(page: Page, report: Path, width: int) -> None:
    page.open(report, width)
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = """[...document.querySelectorAll('section *')].filter(one => !one.closest('.scroll, svg')
        && !one.classList.contains('hidden') && one.getBoundingClientRect().right > innerWidth + 1).length"""
    assert page.evaluate(outside) == 0


@pytest.mark.parametrize("width", [1280, 390])
def test_a_token_says_who_decided_it_on_focus(page: Page, report: Path, width: int) -> None:
    page.open(report, width)
    page.evaluate("document.querySelector('.strip .t').focus()")
    assert (tip(page) or "").startswith("token 1, id ")
    assert "entropy" in (tip(page) or "")
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "tip"
    box = page.evaluate("JSON.stringify(tip.getBoundingClientRect())")
    assert 0 <= json.loads(box)["left"] <= json.loads(box)["right"] <= width
    page.press("ArrowRight")
    assert (tip(page) or "").startswith("token 2, id ")
    page.press("End")
    last = page.evaluate("document.querySelector('.strip').children.length")
    assert (tip(page) or "").startswith(f"token {last}, id ")
    page.press("Escape")
    assert tip(page) is None


def test_a_strip_is_one_stop_of_the_tab_key(page: Page, report: Path) -> None:
    page.open(report, 1280)
    stops = "[...document.querySelectorAll('.strip')].every(s => s.querySelectorAll('[tabindex=\"0\"]').length === 1)"
    page.evaluate("document.querySelector('.strip .t').focus()")
    page.press("ArrowRight")
    assert page.evaluate(stops)
    page.press("Tab")
    assert page.evaluate("document.activeElement.parentElement === document.querySelectorAll('.strip')[1]")


@pytest.mark.parametrize("what", [".strip .t", ".point .reach"])
def test_pointing_shows_what_is_there(page: Page, report: Path, what: str) -> None:
    page.open(report, 1280)
    centre = f"""(() => {{ const one = document.querySelector('{what}'); one.scrollIntoView({{ block: 'center' }});
        const box = one.getClientRects()[0];
        return [box.left + box.width / 2, box.top + box.height / 2]; }})()"""
    page.hover(1, 1)
    x, y = page.evaluate(centre)
    page.evaluate("new Promise(done => setTimeout(done, 100))")
    page.hover(x, y)
    assert tip(page)
    page.hover(1, 1)
    assert tip(page) is None


def test_a_column_sorts_by_its_numbers(page: Page, report: Path) -> None:
    page.open(report, 1280)
    page.evaluate("document.querySelector('#overview details').open = true")
    page.evaluate("document.querySelectorAll('#overview th button')[5].focus()")
    column = "[...document.querySelectorAll('#overview tbody tr')].map(row => Number(row.cells[5].dataset.key || -1))"
    page.press("Enter")
    rising = page.evaluate(column)
    assert rising == sorted(rising)
    page.press("Enter")
    assert page.evaluate(column) == sorted(rising, reverse=True)
    assert page.evaluate("document.querySelectorAll('#overview th')[5].getAttribute('aria-sort')") == "descending"


def test_texts_stand_out_from_what_is_behind_them(page: Page, report: Path) -> None:
    """WCAG AA: at least 4.5 to 1, in both themes, for tokens of every kind and for what is said softly."""
    contrast = (
        "(() => {"
        + chromium.CONTRAST
        + """
      const texts = [...document.querySelectorAll('.t, .lead, .mode, dt, summary, th button, .soft, a')];
      return texts.slice(0, 400).map(contrast).reduce((a, b) => Math.min(a, b)); })()"""
    )
    for dark in (False, True):
        page.open(report, 1280, dark=dark)
        assert page.evaluate(contrast) >= 4.5


def test_the_conclusion_comes_first_and_tables_are_folded(page: Page, report: Path) -> None:
    page.open(report, 1280)
    assert page.evaluate("document.querySelector('main section').id") == "conclusion"
    assert page.evaluate("document.querySelector('#conclusion li').getBoundingClientRect().top < innerHeight")
    assert page.evaluate("[...document.querySelectorAll('table')].every(t => !t.closest('details').open)")


def test_no_table_is_cut_on_a_laptop(page: Page, report: Path) -> None:
    page.open(report, 1280)
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    cut = "[...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth > one.clientWidth + 1)"
    assert page.evaluate(f"{cut}.map(one => one.getAttribute('aria-label'))") == []
