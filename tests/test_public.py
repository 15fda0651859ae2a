"""The package as a notebook shows it: names, results, and one decoder in two threads."""

from __future__ import annotations

import threading
from html.parser import HTMLParser
from typing import Any

import pytest

import outrider
from outrider import SpeculativeDecoder, load_engine, local
from outrider.decoding.result import Result, Stats
from outrider.decoding.sequence import Source
from outrider.engines.shared_engine import SharedEngine
from outrider.errors import StateError
from tests.support.tiny_text_models import engine


def test_dir_lists_the_public_names_and_each_of_them_is_there() -> None:
    assert set(dir(outrider)) == {*outrider.__all__, "__version__"}
    assert all(getattr(outrider, name) is not None for name in dir(outrider))


def result(text: str | None, **more: Any) -> Result:
    stats = Stats(blocks=2, escalated=1, rounds=1, cloud_tokens=1, edge_tokens=1, total_s=0.5)
    pieces = [] if text is None else [text[:3], text[3:]]
    more = {"pieces": pieces, **more}
    return Result(text, [1, 2], "eos", "best-effort", 1, stats, [Source.EDGE, Source.BONUS], **more)


def test_a_result_s_repr_is_one_short_line() -> None:
    assert repr(result("a\nb")) == "Result(best-effort, 2 tokens, eos, 0.50 s: 'a\\nb')"
    assert "\n" not in repr(result("\n" * 1000, warnings=["w"]))
    assert len(repr(result("x" * 10_000))) < 200
    assert "[1, 2]" in repr(result(None))


class Page(HTMLParser):
    """The tags and attributes of a page, the text of each <pre>, <p> and <span>, and the tags that are still open."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[tuple[str, str, str]] = []  # tag, title, text
        self.open: list[tuple[str, str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert {name for name, _ in attributes} <= {"style", "title"}
        self.open.append((tag, dict(attributes).get("title") or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, text: str) -> None:
        self.texts.append((*self.open[-1], text))


@pytest.mark.parametrize(
    "hostile", ["<script>alert(1)</script>&\"'", "</pre></span><b onload='x'>", '" onload="x', "&lt;"]
)
def test_a_result_in_a_notebook_is_escaped(hostile: str) -> None:
    page = Page(result(hostile, warnings=[hostile, "\u202ereversed"])._repr_html_())
    assert page.open == []
    assert page.tags == {"div", "p", "pre", "span", "table", "tr", "th", "td"}
    assert "".join(text for tag, _, text in page.texts[:3] if tag == "span") == hostile
    assert ("p", "", f"warning: {hostile}") in page.texts
    assert ("p", "", "warning: \\u202ereversed") in page.texts
    assert ("td", "", "best-effort") in page.texts


def test_a_result_in_a_notebook_states_its_gain_and_colours_its_tokens_by_source() -> None:
    page = Page(result("abcdef")._repr_html_())
    said = "Same text as the cloud alone is promised for 0 of 1 outputs; 1 of 2 blocks went to the cloud."
    assert page.texts[0] == ("p", "", said)
    assert page.texts[1:3] == [("span", "edge", "abc"), ("span", "bonus", "def")]
    assert ("span", "edge", "1 edge") in page.texts
    ids = Page(result(None)._repr_html_())
    assert ids.texts[1:3] == [("span", "edge", "1 "), ("span", "bonus", "2 ")]


def test_the_pieces_of_a_result_make_its_text() -> None:
    decoder = SpeculativeDecoder(load_engine("demo:edge"), local(load_engine("demo:cloud")))
    made = decoder.generate("你好, the speaker 👩‍💻", max_new_tokens=20, temperature=1.5, seed=3)
    assert "".join(made.pieces) == made.text
    assert len(made.pieces) == len(made.token_ids) == len(made.sources)
    page = Page(made._repr_html_())
    spans = [text for tag, _, text in page.texts if tag == "span"]
    assert "".join(spans).startswith(made.text or "-")
    assert page.texts[0][2].startswith("Same text as the cloud alone would give; the large model ran")
    assert "pieces" not in made.to_json()
    without = SpeculativeDecoder(engine("qwen2")).generate([1, 2], max_new_tokens=4)
    assert (without.text, without.pieces) == (None, [])


# One decoder, two threads -----------------------------------------------------------------------------------

SETTINGS = {"max_new_tokens": 6, "ignore_eos": True}


def in_thread(do: Any) -> Any:
    """What `do` returns or raises in another thread."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(do())
        except StateError as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    return found[0]


@pytest.mark.parametrize("sides", ["edge", "pair", "cloud"])
def test_a_second_thread_is_refused_while_a_generation_is_unfinished(sides: str) -> None:
    draft = engine("qwen2") if sides != "cloud" else None
    verifier = local(engine("qwen2", 1)) if sides != "edge" else None
    decoder = SpeculativeDecoder(draft, verifier)
    first = decoder.stream([1, 2, 3], **SETTINGS)
    next(first)
    refused = in_thread(lambda: decoder.generate([1, 2, 3], **SETTINGS))
    assert isinstance(refused, StateError)
    assert "another thread is generating with this decoder" in str(refused)
    second = decoder.stream([1, 2, 3], **SETTINGS)  # the same thread may interleave
    assert [event.token_id for event in second] == [event.token_id for event in decoder.stream([1, 2, 3], **SETTINGS)]
    first.close()
    assert isinstance(in_thread(lambda: decoder.generate([1, 2, 3], **SETTINGS)), Result)


def test_a_generation_may_move_between_threads() -> None:
    decoder = SpeculativeDecoder(engine("qwen2"))
    whole = [event.token_id for event in decoder.stream([1, 2, 3], **SETTINGS)]
    stream = decoder.stream([1, 2, 3], **SETTINGS)
    first = next(stream).token_id
    assert [first, *in_thread(lambda: [event.token_id for event in stream])] == whole


def test_a_failed_generation_gives_the_turn_back() -> None:
    decoder = SpeculativeDecoder(engine("qwen2"))
    stream = decoder.stream([1, 2, 3], **SETTINGS)
    next(stream)
    with pytest.raises(RuntimeError):
        stream.throw(RuntimeError("a caller's"))
    assert isinstance(in_thread(lambda: decoder.generate([1, 2, 3], **SETTINGS)), Result)


def test_shared_engines_take_several_threads() -> None:
    decoder = SpeculativeDecoder(SharedEngine(engine("qwen2")))
    stream = decoder.stream([1, 2, 3], **SETTINGS)
    next(stream)
    assert isinstance(in_thread(lambda: decoder.generate([1, 2, 3], **SETTINGS)), Result)
    stream.close()
