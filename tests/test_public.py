"""The package as a notebook shows it: names, results, and one decoder in two threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import outrider
from outrider import SpeculativeDecoder, local
from outrider.decoding.result import Result, Stats
from outrider.decoding.sequence import Source
from outrider.engines.shared_engine import SharedEngine
from outrider.errors import StateError
from tests.support.tiny_text_models import engine


def test_dir_lists_the_public_names_and_each_of_them_is_there() -> None:
    assert set(dir(outrider)) == {*outrider.__all__, "__version__"}
    assert all(getattr(outrider, name) is not None for name in dir(outrider))


def result(text: str | None, **more: Any) -> Result:
    stats = Stats(blocks=2, escalated=1, cloud_tokens=1, edge_tokens=1, total_s=0.5)
    return Result(text, [1, 2], "eos", "best-effort", 1, stats, [Source.EDGE, Source.BONUS], **more)


def test_a_result_s_repr_is_one_short_line() -> None:
    assert repr(result("a\nb")) == "Result(best-effort, 2 tokens, eos, 0.50 s: 'a\\nb')"
    assert "\n" not in repr(result("\n" * 1000, warnings=["w"]))
    assert len(repr(result("x" * 10_000))) < 200
    assert "[1, 2]" in repr(result(None))


def test_a_result_in_a_notebook_is_escaped() -> None:
    hostile = "<script>alert(1)</script>&\"'"
    page = result(hostile, warnings=[hostile])._repr_html_()
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") == 2
    assert "best-effort" in page
    assert "50 %" in page


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
