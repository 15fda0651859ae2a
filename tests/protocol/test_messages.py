"""Messages and dataclasses: what goes in comes out, and what cannot be used is refused before anyone uses it."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from outrider.config import GenerationSettings, Grammar
from outrider.decoding.actions import Verify
from outrider.errors import SettingsError
from outrider.protocol import messages, schema
from outrider.protocol.messages import ErrorCode, FrameError
from outrider.sampling import acceptance
from outrider.sampling.acceptance import REJECTION_SHORTLIST, Verdict
from outrider.sampling.logprobs import Logprobs
from outrider.sampling.sampler import Support

V, ROWS = 1000, 1024
UINT32, UINT64 = 2**32 - 1, 2**64 - 1
ids = st.integers(0, UINT32)
numbers = st.floats(allow_nan=False, allow_infinity=False)


def refused(code: int) -> Any:
    return pytest.raises(FrameError, check=lambda refusal: refusal.code == code)


# Settings -------------------------------------------------------------------------------------------------------


@st.composite
def settings_(draw: st.DrawFn) -> GenerationSettings:
    most = draw(st.integers(1, UINT32))
    warm = draw(st.booleans())
    penalty = draw(st.just(1.0) | st.floats(0.01, 100))
    texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
    grammar = draw(st.none() | st.just(Grammar("json_object")) | st.builds(Grammar, st.just("regex"), texts))
    return GenerationSettings(
        max_new_tokens=most,
        min_new_tokens=draw(st.integers(0, most)),
        temperature=draw(st.floats(0, exclude_min=True, allow_infinity=False)) if warm else 0.0,
        top_k=draw(st.integers(0, UINT32)) if warm else 0,
        top_p=draw(st.just(1.0) | st.floats(0, 1, exclude_min=True)) if warm else 1.0,
        min_p=draw(st.floats(0, 1)) if warm else 0.0,
        seed=draw(st.integers(0, UINT64)),
        repetition_penalty=penalty,
        repetition_window=draw(st.integers(0, UINT32)) if penalty != 1.0 else 0,
        no_repeat_ngram_size=draw(st.integers(0, UINT32)),
        ignore_eos=draw(st.booleans()) and grammar is None,
        suppress_tokens=tuple(draw(st.lists(st.integers(0, V - 1), max_size=5))),
        frequency_penalty=draw(st.floats(-2, 2)),
        presence_penalty=draw(st.floats(-2, 2)),
        logprobs=draw(st.none() | st.integers(0, 20)),
        logit_bias=tuple(sorted(draw(st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100))).items())),
        grammar=grammar,
    )


@given(settings_())
@example(GenerationSettings())
@example(GenerationSettings(max_new_tokens=UINT32, temperature=1e308, top_p=5e-324, seed=UINT64))
def test_settings_come_back_as_they_were(settings: GenerationSettings) -> None:
    sent = schema.Settings.FromString(messages.pack_settings(settings).SerializeToString())
    assert messages.unpack_settings(sent, V) == settings


def test_text_stays_on_the_edge() -> None:
    sent = messages.pack_settings(GenerationSettings(stop=("秘密",), sentences=2))
    assert sent == messages.pack_settings(GenerationSettings())
    assert "秘密".encode() not in sent.SerializeToString()


def test_defaults_cost_nothing_but_the_length() -> None:
    assert len(messages.pack_settings(GenerationSettings(max_new_tokens=1)).SerializeToString()) == 2


@pytest.mark.parametrize(
    "spoilt",
    [
        {},  # max_new_tokens 0
        {"max_new_tokens": 1, "min_new_tokens": 2},
        {"max_new_tokens": 1, "temperature": -1.0},
        {"max_new_tokens": 1, "temperature": math.nan},
        {"max_new_tokens": 1, "temperature": math.inf},
        {"max_new_tokens": 1, "temperature": 1.0, "top_p": 0.0},
        {"max_new_tokens": 1, "temperature": 1.0, "min_p": 1.5},
        {"max_new_tokens": 1, "top_k": 3},  # greedy
        {"max_new_tokens": 1, "repetition_penalty": 0.0},
        {"max_new_tokens": 1, "repetition_penalty": math.nan},
        {"max_new_tokens": 1, "frequency_penalty": 2.1},
        {"max_new_tokens": 1, "presence_penalty": math.nan},
        {"max_new_tokens": 1, "logprobs": 21},
        {"max_new_tokens": 1, "logit_bias": {1: 101.0}},
        {"max_new_tokens": 1, "logit_bias": {1: math.nan}},
    ],
)
def test_settings_that_the_edge_could_not_have_are_refused(spoilt: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        messages.unpack_settings(schema.Settings(**spoilt), V)


def test_tokens_to_suppress_are_the_models_and_no_more_than_it_has() -> None:
    sent = schema.Settings(max_new_tokens=1, suppress_tokens=[V])
    with refused(ErrorCode.SETTINGS):
        messages.unpack_settings(sent, V)
    with refused(ErrorCode.SETTINGS):
        messages.unpack_settings(schema.Settings(max_new_tokens=1, suppress_tokens=[0] * (V + 1)), V)
    with refused(ErrorCode.SETTINGS):
        messages.unpack_settings(schema.Settings(max_new_tokens=1, logit_bias={V: 1.0}), V)


@pytest.mark.parametrize("spec", ["", "exact", "residual", "rank:20", "margin:0.5", "typical:0.09"])
def test_acceptance_rules(spec: str) -> None:
    assert messages.unpack_accept(spec) == (spec or "exact")


@pytest.mark.parametrize("spec", ["rank:" + "9" * 400, "rank:" + "9" * 5000, "x" * 10**6, "rank:0", "贪婪", "exact "])
def test_no_other_rule_is_taken_and_long_ones_are_not_quoted(spec: str) -> None:
    """rank: with 400 digits is a whole number, but none that fits a float."""
    with pytest.raises((SettingsError, FrameError)) as caught:
        messages.unpack_accept(spec)
    assert len(str(caught.value)) < 200


# Token ids ------------------------------------------------------------------------------------------------------


runs = st.lists(st.tuples(ids, st.integers(1, 40)), max_size=8).map(
    lambda parts: [token for token, count in parts for _ in range(count)]
)


@given(st.lists(ids, max_size=50) | runs)
@example([])
@example([7] * 1000)
def test_ids_come_back_as_they_were(tokens: list[int]) -> None:
    sent = schema.Ids.FromString(messages.pack_ids(tokens).SerializeToString())
    assert messages.unpack_ids(sent, len(tokens), "a prompt") == tuple(tokens)
    assert len(sent.SerializeToString()) <= len(schema.Ids(token=tokens).SerializeToString()) + 4
    if tokens:
        with refused(ErrorCode.PROMPT):
            messages.unpack_ids(sent, len(tokens) - 1, "a prompt")


def test_runs_are_folded() -> None:
    assert len(messages.pack_ids([1, *[151646] * 750, 2]).SerializeToString()) < 20


@pytest.mark.parametrize("counts", [[UINT32], [UINT32] * 1000, [1, UINT32, 1]])
def test_too_many_are_refused_before_they_are_unfolded(counts: list[int]) -> None:
    sent = schema.Ids(token=range(len(counts)), count=counts)
    tracemalloc.start()
    try:
        with refused(ErrorCode.PROMPT):
            messages.unpack_ids(sent, 4096, "a prompt")
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("token", "count"), [([1, 2], [1]), ([1], [1, 1]), ([], [1]), ([1, 2], [3, 0]), ([1] * 9, [0] * 9)]
)
def test_counts_fit_the_tokens(token: list[int], count: list[int]) -> None:
    with refused(ErrorCode.INVALID):
        messages.unpack_ids(schema.Ids(token=token, count=count), 4096, "a prompt")


def test_an_id_beyond_the_limit_is_named() -> None:
    messages.check_ids([], 0, "nothing")
    messages.check_ids([V - 1], V, "the prompt")
    with pytest.raises(FrameError, match="the prompt: token 1000 lies beyond 999"):
        messages.check_ids([1, V, 2], V, "the prompt")


def test_the_digest_is_that_of_the_document() -> None:
    """First 8 bytes of SHA-256 over ids as little-endian uint32, then media: fixed, for clients in any language."""
    assert messages.digest([1, 2**32 - 1], b"abc").hex() == "bc1a458429374b6d"
    assert messages.digest([]).hex() == "e3b0c44298fc1c14"


# Verify and verdict ---------------------------------------------------------------------------------------------


@st.composite
def supports(draw: st.DrawFn) -> Support:
    count = draw(st.integers(1, REJECTION_SHORTLIST))
    tokens = draw(st.lists(st.integers(0, V - 1), min_size=count, max_size=count, unique=True))
    logits = draw(st.lists(st.floats(-30, 30), min_size=count, max_size=count))
    return Support(torch.tensor(tokens), torch.log_softmax(torch.tensor(logits, dtype=torch.float32), -1))


@st.composite
def requests(draw: st.DrawFn) -> Verify:
    drafts = tuple(draw(st.lists(st.integers(0, V - 1), max_size=schema.MAX_DRAFTS)))
    q = tuple(draw(supports()) for _ in drafts[:4]) if draw(st.booleans()) else ()
    drafts = drafts[:4] if q else drafts
    new = tuple(draw(st.lists(st.integers(0, ROWS - 1), max_size=9)))
    return Verify(draw(st.integers(1, UINT32)), draw(ids), new, drafts, q)


@given(requests())
def test_a_request_comes_back_as_it_was(request: Verify) -> None:
    sent = schema.Request.FromString(messages.pack_verify(request).SerializeToString())
    back = messages.unpack_verify(sent.verify, V, ROWS)
    assert replace(back, q=()) == replace(request, q=())
    for one, other in zip(back.q, request.q, strict=True):
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.logp, other.logp)  # float32, bit for bit: both sides draw from the same


def shortlist(ids: list[int], probabilities: list[float]) -> schema.Shortlist:
    return schema.Shortlist(ids=ids, logp=[math.log(p) if p > 0 else -math.inf for p in probabilities])


GOOD = shortlist([1, 2], [0.5, 0.5])


@pytest.mark.parametrize(
    "bad",
    [
        schema.Shortlist(),
        schema.Shortlist(ids=[1], logp=[]),
        schema.Shortlist(ids=[1, 2], logp=[0.0]),
        schema.Shortlist(ids=[1, 2], logp=[math.nan, 0.0]),
        schema.Shortlist(ids=[1, 2], logp=[math.inf, 0.0]),
        schema.Shortlist(ids=[1, 2], logp=[-math.inf, -math.inf]),
        schema.Shortlist(ids=[1, 2], logp=[3e38, 3e38]),
        shortlist([1, 2], [0.5, 0.4]),
        shortlist([1, 1], [0.5, 0.5]),
        shortlist([1, V], [0.5, 0.5]),
        schema.Shortlist(ids=range(33), logp=[-math.log(33)] * 33),
    ],
    ids=lambda bad: f"{len(bad.ids)}-{len(bad.logp)}" if isinstance(bad, schema.Shortlist) else None,
)
def test_what_is_no_distribution_is_refused(bad: schema.Shortlist) -> None:
    with refused(ErrorCode.INVALID):
        messages.unpack_verify(schema.Verify(round=1, draft_ids=[1, 2], q=[GOOD, bad]), V, ROWS)


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (schema.Verify(round=0), ErrorCode.INVALID),
        (schema.Verify(round=1, draft_ids=[0] * (schema.MAX_DRAFTS + 1)), ErrorCode.TOO_LARGE),
        (schema.Verify(round=1, draft_ids=[V]), ErrorCode.INVALID),
        (schema.Verify(round=1, new_ids=[ROWS]), ErrorCode.INVALID),
        (schema.Verify(round=1, draft_ids=[1, 2], q=[GOOD]), ErrorCode.INVALID),
        (schema.Verify(round=1, q=[GOOD]), ErrorCode.INVALID),
    ],
)
def test_requests_that_no_session_can_use(frame: schema.Verify, code: int) -> None:
    with refused(code):
        messages.unpack_verify(frame, V, ROWS)


def test_padding_can_be_read_but_not_drafted() -> None:
    assert messages.unpack_verify(schema.Verify(round=1, new_ids=[V]), V, ROWS).new_ids == (V,)


@given(
    st.builds(
        Verdict,
        st.integers(1, UINT32),
        st.integers(0, 64),
        ids,
        st.lists(st.integers(0, 64), max_size=5).map(tuple),
        st.integers(0, UINT32),
        st.integers(0, UINT32),
        st.floats(0, 3600),
        st.floats(0, 3600),
        st.integers(0, UINT32),
        st.lists(
            st.lists(st.tuples(st.integers(0, UINT32), st.floats(max_value=0, width=32)), min_size=1, max_size=4).map(
                lambda pairs: Logprobs(*map(tuple, zip(*pairs, strict=True)))
            ),
            max_size=4,
        ).map(tuple),
    )
)
def test_a_verdict_comes_back_as_it_was(verdict: Verdict) -> None:
    answer = schema.Answer.FromString(messages.pack_verdict(verdict, 64).SerializeToString())
    back = messages.unpack_verdict(answer.verdict)
    assert back == verdict
    assert back.queue_s == pytest.approx(verdict.queue_s, abs=5.1e-5)
    assert back.compute_s == pytest.approx(verdict.compute_s, abs=5.1e-5)


@pytest.mark.parametrize(("accepted", "drafts", "name"), [(0, 0, "BONUS"), (3, 3, "BONUS"), (2, 3, "CORRECTION")])
def test_verdicts_name_the_reason_of_their_token(accepted: int, drafts: int, name: str) -> None:
    frame = messages.pack_verdict(acceptance.Verdict(1, accepted, 5), drafts).verdict
    assert frame.DESCRIPTOR.fields_by_name["reason"].enum_type.values_by_number[frame.reason].name == name


# FrameReader ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x03\x2a\x01\xff"])
def test_bytes_that_are_no_message_are_refused_and_not_quoted(data: bytes) -> None:
    """The last one holds a text that is no UTF-8."""
    with refused(ErrorCode.INVALID):
        messages.parse_request(data)
    with pytest.raises(DecodeError):
        schema.Request.FromString(data)


@pytest.mark.parametrize("data", [b"", b"\x7a\x00"], ids=["empty", "a frame of a later version"])
def test_a_frame_of_no_known_kind_is_refused(data: bytes) -> None:
    with refused(ErrorCode.INVALID):
        messages.parse_request(data)


def test_an_error_says_when_to_come_back() -> None:
    frame = messages.error_answer(FrameError(ErrorCode.LIMIT, "later", 0.0101)).error
    assert (frame.code, frame.message, frame.retry_after_ms) == (ErrorCode.LIMIT, "later", 11)
    assert messages.error_answer(FrameError(ErrorCode.LIMIT, "now", -1.0)).error.retry_after_ms == 0
    assert FrameError(ErrorCode.UNKNOWN_SESSION, "x").kind == "unknown_session"
