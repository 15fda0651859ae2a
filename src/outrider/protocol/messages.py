"""Conversion between protobuf messages and dataclasses, with validation of all received fields."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import fields

import numpy as np
import torch
from google.protobuf.message import DecodeError

from outrider.config import GenerationSettings, Grammar
from outrider.decoding.actions import Verify
from outrider.errors import CloudRefused, OutriderError
from outrider.protocol import schema
from outrider.sampling import acceptance
from outrider.sampling.logprobs import Logprobs
from outrider.sampling.sampler import Support

DIGEST_BYTES = 8
MAX_RULE_LENGTH = 64  # characters of an acceptance rule
_MEDIA_TAG = bytes([schema.Request.DESCRIPTOR.fields_by_name["media"].number << 3 | 2])  # wire type 2: length-delimited
TENTHS_PER_SECOND = 1e4  # tenths of a millisecond in a second
ErrorCode = schema.Error


class FrameError(OutriderError):
    """The refusal of a frame, sent as an Error frame. code: one of schema.Error.Code. retry_after: seconds."""

    def __init__(self, code: int, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.code, self.retry_after = code, retry_after

    @property
    def kind(self) -> str:
        """Return the code's name in lower case."""
        return schema.Error.Code.Name(self.code).lower()


def parse_request(data: bytes, limit: int | None = None) -> schema.Request:
    """Parse a frame from an edge. limit: most bytes of a frame, except of Media, checked before parsing.

    Raises:
        FrameError: the data is not a Request message, has no frame known to this version, or is too large.
    """
    if limit is not None and len(data) > limit and not data.startswith(_MEDIA_TAG):
        raise FrameError(ErrorCode.TOO_LARGE, f"a frame of {len(data)} bytes that is not media: at most {limit}")
    try:
        request = schema.Request.FromString(data)
    except DecodeError as error:
        raise FrameError(ErrorCode.INVALID, "a frame that cannot be parsed") from error
    if request.WhichOneof("frame") is None:
        raise FrameError(ErrorCode.INVALID, "a frame of a kind that this version does not know")
    return request


def parse_answer(data: bytes) -> schema.Answer:
    """Parse a frame from a cloud.

    Raises:
        CloudRefused: the data is not an Answer message.
    """
    try:
        return schema.Answer.FromString(data)
    except DecodeError as error:
        raise CloudRefused("the cloud sent a frame that cannot be parsed") from error


def error_answer(error: FrameError) -> schema.Answer:
    """Build the Error frame of a refusal."""
    retry = max(0, math.ceil(error.retry_after * 1000))
    return schema.Answer(error=schema.Error(code=error.code, message=str(error), retry_after_ms=retry))  # type: ignore[arg-type]


# Token ids ------------------------------------------------------------------------------------------------------


def digest(ids: Seq[int], media: bytes = b"") -> bytes:
    """Return the first 8 bytes of SHA-256 over ids (little-endian uint32), then media."""
    return hashlib.sha256(np.asarray(ids, dtype="<u4").tobytes() + media).digest()[:DIGEST_BYTES]


def pack_ids(ids: Seq[int]) -> schema.Ids:
    """Pack ids, run-length encoded if that is shorter."""
    array = np.asarray(ids, dtype=np.int64)
    starts = np.flatnonzero(np.diff(array, prepend=-1))
    if len(starts) > len(array) * 0.6:
        return schema.Ids(token=ids)
    return schema.Ids(token=array[starts].tolist(), count=np.diff(starts, append=len(array)).tolist())


def unpack_ids(packed: schema.Ids, limit: int, field: str) -> tuple[int, ...]:
    """Return at most `limit` ids.

    Lengths and the sum of the counts are checked before the runs are expanded, so the time is bounded by `limit`.

    Raises:
        FrameError: there are too many ids, or the counts do not fit the tokens.
    """
    tokens, counts = len(packed.token), len(packed.count)
    if counts and counts != tokens:
        raise FrameError(ErrorCode.INVALID, f"{field}: {counts} counts for {tokens} tokens")
    if tokens > limit:  # every count is at least 1
        raise FrameError(ErrorCode.PROMPT, f"{field} of {tokens} tokens or more: this service takes at most {limit}")
    if counts and not min(packed.count):
        raise FrameError(ErrorCode.INVALID, f"{field}: a token that counts 0 times")
    total = sum(packed.count) if counts else tokens
    if total > limit:
        raise FrameError(ErrorCode.PROMPT, f"{field} of {total} tokens: this service takes at most {limit}")
    if not packed.count:
        return tuple(packed.token)
    return tuple(token for token, count in zip(packed.token, packed.count, strict=True) for _ in range(count))


def check_ids(ids: Iterable[int], limit: int, field: str, code: int = ErrorCode.INVALID) -> None:
    """Raise FrameError if an id is not below `limit`."""
    highest = max(ids, default=-1)
    if highest >= limit:
        raise FrameError(code, f"{field}: token {highest} lies beyond {limit - 1}")


# Settings -------------------------------------------------------------------------------------------------------

_EDGE_FIELDS = ("stop", "sentences")  # applied to text, which only the edge has
_OPTIONAL_FIELDS = ("top_p", "repetition_penalty", "logprobs")  # absent at their defaults, which differ from protobuf's
_SENT_FIELDS = tuple(f.name for f in fields(GenerationSettings) if f.name not in _EDGE_FIELDS)


def pack_settings(settings: GenerationSettings) -> schema.Settings:
    """Pack the settings that the target's sampling needs. Stop strings and sentence limits stay on the edge."""
    values = {name: getattr(settings, name) for name in _SENT_FIELDS}
    for name in _OPTIONAL_FIELDS:
        if values[name] == getattr(GenerationSettings, name):
            del values[name]
    values["logit_bias"] = dict(settings.logit_bias)
    grammar = values.pop("grammar")
    if grammar is not None:
        values["grammar"] = schema.Grammar(kind=grammar.kind, text=grammar.text)
    return schema.Settings(**values)


def unpack_settings(packed: schema.Settings, vocab_size: int) -> GenerationSettings:
    """Unpack the settings, with the same validation as on the edge.

    Raises:
        FrameError: a suppressed or biased token, or the number of tokens, is outside the target's vocabulary.
        SettingsError: a value is out of range or contradicts another.
    """
    if len(packed.suppress_tokens) > vocab_size:  # each costs time at every position
        message = f"{len(packed.suppress_tokens)} suppress_tokens, but the target has {vocab_size} tokens"
        raise FrameError(ErrorCode.SETTINGS, message)
    check_ids(packed.suppress_tokens, vocab_size, "suppress_tokens", ErrorCode.SETTINGS)
    check_ids(packed.logit_bias, vocab_size, "logit_bias", ErrorCode.SETTINGS)
    values = {name: getattr(packed, name) for name in _SENT_FIELDS}
    for name in _OPTIONAL_FIELDS:
        if not packed.HasField(name):
            del values[name]
    values["suppress_tokens"], values["logit_bias"] = tuple(packed.suppress_tokens), dict(packed.logit_bias)
    grammar = Grammar(packed.grammar.kind, packed.grammar.text) if packed.HasField("grammar") else None  # type: ignore[arg-type]
    return GenerationSettings.build({**values, "grammar": grammar})


def unpack_accept(spec: str) -> str:
    """Return the acceptance rule. An empty one is "exact".

    Raises:
        FrameError: the text is too long.
        SettingsError: the rule is unknown.
    """
    if len(spec) > MAX_RULE_LENGTH:
        message = f"accept: a rule has at most {MAX_RULE_LENGTH} characters, not {len(spec)}"
        raise FrameError(ErrorCode.SETTINGS, message)
    acceptance.parse_acceptance_rule(spec or "exact")
    return spec or "exact"


# Verify and verdict ---------------------------------------------------------------------------------------------


def pack_verify(request: Verify) -> schema.Request:
    """Build the Verify frame of a request."""
    q = [schema.Shortlist(ids=part.ids.tolist(), logp=part.logp.tolist()) for part in request.q]
    frame = schema.Verify(
        round=request.round, base_length=request.base_length, new_ids=request.new_ids, draft_ids=request.draft_ids, q=q
    )
    return schema.Request(verify=frame)


def unpack_verify(frame: schema.Verify, vocab_size: int, row_count: int) -> Verify:
    """Unpack a Verify frame.

    Raises:
        FrameError: round, ids or q are invalid.
    """
    if frame.round < 1:
        raise FrameError(ErrorCode.INVALID, "rounds count from 1")
    if len(frame.draft_ids) > schema.MAX_DRAFTS:
        message = f"{len(frame.draft_ids)} drafts: at most {schema.MAX_DRAFTS} in one request"
        raise FrameError(ErrorCode.TOO_LARGE, message)
    check_ids(frame.new_ids, row_count, "new_ids")
    check_ids(frame.draft_ids, vocab_size, "draft_ids")
    if frame.q and len(frame.q) != len(frame.draft_ids):
        raise FrameError(ErrorCode.INVALID, f"{len(frame.q)} distributions for {len(frame.draft_ids)} drafts")
    q = tuple(_unpack_shortlist(part, vocab_size) for part in frame.q)
    return Verify(frame.round, frame.base_length, tuple(frame.new_ids), tuple(frame.draft_ids), q)


def _unpack_shortlist(part: schema.Shortlist, vocab_size: int) -> Support:
    if not part.ids or len(part.ids) != len(part.logp) or len(part.ids) > acceptance.REJECTION_SHORTLIST:
        message = f"a distribution of {len(part.ids)} ids and {len(part.logp)} log-probabilities"
        raise FrameError(ErrorCode.INVALID, message)
    check_ids(part.ids, vocab_size, "q")
    logp = torch.tensor(list(part.logp), dtype=torch.float32)
    if len(set(part.ids)) < len(part.ids) or not abs(float(torch.logsumexp(logp, -1))) < 1e-3:
        raise FrameError(ErrorCode.INVALID, "q is not a distribution: it has repeated ids, or its sum is not 1")
    return Support(torch.tensor(list(part.ids)), logp)


def pack_verdict(verdict: acceptance.Verdict, drafts: int) -> schema.Answer:
    """Build the Verdict frame. drafts: number of drafted tokens in the request."""
    frame = schema.Verdict(
        round=verdict.round,
        accepted=verdict.accepted,
        next_token=verdict.next_token,
        reason=int(verdict.accepted < drafts),  # type: ignore[arg-type]
        near_ties=verdict.near_ties,
        audited=verdict.audited,
        disagreed=verdict.disagreed,
        queue_tenths=round(verdict.queue_s * TENTHS_PER_SECOND),
        compute_tenths=round(verdict.compute_s * TENTHS_PER_SECOND),
        cached=verdict.cached,
        logprobs=[schema.Shortlist(ids=each.ids, logp=each.values) for each in verdict.logprobs],
    )
    return schema.Answer(verdict=frame)


def unpack_verdict(frame: schema.Verdict) -> acceptance.Verdict:
    """Unpack a Verdict frame."""
    return acceptance.Verdict(
        frame.round,
        frame.accepted,
        frame.next_token,
        tuple(frame.near_ties),
        frame.audited,
        frame.disagreed,
        frame.queue_tenths / TENTHS_PER_SECOND,
        frame.compute_tenths / TENTHS_PER_SECOND,
        frame.cached,
        tuple(Logprobs(tuple(each.ids), tuple(each.logp)) for each in frame.logprobs),
    )
