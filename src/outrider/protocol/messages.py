"""Between the wire's messages and our dataclasses. What a peer sent is checked here for form, before anyone uses it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError

from outrider.config import GenerationSettings
from outrider.decoding.actions import Verify
from outrider.errors import CloudRefused, OutriderError
from outrider.protocol import schema
from outrider.sampling import acceptance
from outrider.sampling.sampler import Support

DIGEST_BYTES = 8
MAX_RULE_LENGTH = 64  # characters of an acceptance rule
_MEDIA_TAG = bytes([schema.Request.DESCRIPTOR.fields_by_name["media"].number << 3 | 2])  # its tag: length-delimited
TENTHS_PER_SECOND = 1e4  # tenths of a millisecond in a second
ErrorCode = schema.Error


class FrameError(OutriderError):
    """A frame is refused; becomes an Error frame. code: one of schema.Error's. retry_after: seconds."""

    def __init__(self, code: int, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.code, self.retry_after = code, retry_after

    @property
    def kind(self) -> str:
        """The code's name in lower case."""
        return schema.Error.Code.Name(self.code).lower()


def parse_request(data: bytes, limit: int | None = None) -> schema.Request:
    """Parse a frame from an edge. limit: bytes of any frame but Media, whose size is checked before it is parsed.

    Raises:
        FrameError: it is not a message of the protocol, holds no frame known to this version, or is too large.
    """
    if limit is not None and len(data) > limit and not data.startswith(_MEDIA_TAG):
        raise FrameError(ErrorCode.TOO_LARGE, f"a frame of {len(data)} bytes that is not media: at most {limit}")
    try:
        request = schema.Request.FromString(data)
    except DecodeError as error:
        raise FrameError(ErrorCode.INVALID, "a frame that cannot be read") from error
    if request.WhichOneof("frame") is None:
        raise FrameError(ErrorCode.INVALID, "a frame of no kind that this version knows")
    return request


def parse_answer(data: bytes) -> schema.Answer:
    """A frame from a cloud.

    Raises:
        CloudRefused: it is no message of the protocol.
    """
    try:
        return schema.Answer.FromString(data)
    except DecodeError as error:
        raise CloudRefused("the cloud sent a frame that cannot be read") from error


def error_answer(error: FrameError) -> schema.Answer:
    retry = max(0, math.ceil(error.retry_after * 1000))
    return schema.Answer(error=schema.Error(code=error.code, message=str(error), retry_after_ms=retry))  # type: ignore[arg-type]


# Token ids ------------------------------------------------------------------------------------------------------


def digest(ids: Seq[int], media: bytes = b"") -> bytes:
    """The first 8 bytes of SHA-256 over ids (little-endian uint32), then media."""
    return hashlib.sha256(np.asarray(ids, dtype="<u4").tobytes() + media).digest()[:DIGEST_BYTES]


def pack_ids(ids: Seq[int]) -> schema.Ids:
    """Ids with runs folded, where there are runs worth it."""
    array = np.asarray(ids, dtype=np.int64)
    starts = np.flatnonzero(np.diff(array, prepend=-1))
    if len(starts) > len(array) * 0.6:
        return schema.Ids(token=ids)
    return schema.Ids(token=array[starts].tolist(), count=np.diff(starts, append=len(array)).tolist())


def unpack_ids(packed: schema.Ids, limit: int, field: str) -> tuple[int, ...]:
    """Return at most `limit` ids.

    Lengths are checked first at no cost: the rest takes time in proportion to `limit`, whatever was sent.

    Raises:
        FrameError: too many, or counts that do not fit the tokens. The sum is checked before anything is unfolded.
    """
    tokens, counts = len(packed.token), len(packed.count)
    if counts and counts != tokens:
        raise FrameError(ErrorCode.INVALID, f"{field}: {counts} counts for {tokens} tokens")
    if tokens > limit:  # each counts at least once
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
    """Raise FrameError where an id lies beyond what can be read."""
    highest = max(ids, default=-1)
    if highest >= limit:
        raise FrameError(code, f"{field}: token {highest} lies beyond {limit - 1}")


# Settings -------------------------------------------------------------------------------------------------------

_EDGE_FIELDS = ("stop", "sentences")  # text, and the edge's business
_OPTIONAL_FIELDS = ("top_p", "repetition_penalty")  # whose default, 1, is not protobuf's: absent where they have it
_SENT_FIELDS = tuple(f.name for f in fields(GenerationSettings) if f.name not in _EDGE_FIELDS)


def pack_settings(settings: GenerationSettings) -> schema.Settings:
    """What shapes the target's choices; stop strings and sentences stay on the edge."""
    values: dict[str, Any] = {name: getattr(settings, name) for name in _SENT_FIELDS}
    for name in _OPTIONAL_FIELDS:
        if values[name] == 1.0:
            del values[name]
    return schema.Settings(**values)


def unpack_settings(packed: schema.Settings, vocab_size: int) -> GenerationSettings:
    """Validated as the edge's own would be.

    Raises:
        FrameError: tokens to suppress that the target does not have, or more than it has.
        SettingsError: out of range, or in contradiction.
    """
    if len(packed.suppress_tokens) > vocab_size:  # they cost time at every position
        raise FrameError(
            ErrorCode.SETTINGS, f"{len(packed.suppress_tokens)} suppress_tokens, of {vocab_size} there are"
        )
    check_ids(packed.suppress_tokens, vocab_size, "suppress_tokens", ErrorCode.SETTINGS)
    values: dict[str, Any] = {name: getattr(packed, name) for name in _SENT_FIELDS}
    for name in _OPTIONAL_FIELDS:
        if not packed.HasField(name):
            del values[name]
    return GenerationSettings.build({**values, "suppress_tokens": tuple(packed.suppress_tokens)})


def unpack_accept(spec: str) -> str:
    """The acceptance rule; empty is exact.

    Raises:
        SettingsError: no rule of ours.
    """
    if len(spec) > MAX_RULE_LENGTH:
        raise FrameError(
            ErrorCode.SETTINGS, f"accept: a rule has at most {MAX_RULE_LENGTH} characters, not {len(spec)}"
        )
    acceptance.parse_acceptance_rule(spec or "exact")
    return spec or "exact"


# Verify and verdict ---------------------------------------------------------------------------------------------


def pack_verify(request: Verify) -> schema.Request:
    q = [schema.Shortlist(ids=part.ids.tolist(), logp=part.logp.tolist()) for part in request.q]
    frame = schema.Verify(
        round=request.round,
        base_length=request.base_length,
        new_ids=request.new_ids,
        draft_ids=request.draft_ids,
        q=q,
    )
    return schema.Request(verify=frame)


def unpack_verify(frame: schema.Verify, vocab_size: int, row_count: int) -> Verify:
    """Raises FrameError where round, ids or q are not what a session can use."""
    if frame.round < 1:
        raise FrameError(ErrorCode.INVALID, "rounds count from 1")
    if len(frame.draft_ids) > schema.MAX_DRAFTS:
        raise FrameError(
            ErrorCode.TOO_LARGE, f"{len(frame.draft_ids)} drafts: at most {schema.MAX_DRAFTS} in one request"
        )
    check_ids(frame.new_ids, row_count, "new_ids")
    check_ids(frame.draft_ids, vocab_size, "draft_ids")
    if frame.q and len(frame.q) != len(frame.draft_ids):
        raise FrameError(ErrorCode.INVALID, f"{len(frame.q)} distributions for {len(frame.draft_ids)} drafts")
    q = tuple(_unpack_shortlist(part, vocab_size) for part in frame.q)
    return Verify(frame.round, frame.base_length, tuple(frame.new_ids), tuple(frame.draft_ids), q)


def _unpack_shortlist(part: schema.Shortlist, vocab_size: int) -> Support:
    if not part.ids or len(part.ids) != len(part.logp) or len(part.ids) > acceptance.REJECTION_SHORTLIST:
        raise FrameError(
            ErrorCode.INVALID, f"a distribution of {len(part.ids)} ids and {len(part.logp)} log-probabilities"
        )
    check_ids(part.ids, vocab_size, "q")
    logp = torch.tensor(list(part.logp), dtype=torch.float32)
    if len(set(part.ids)) < len(part.ids) or not abs(float(torch.logsumexp(logp, -1))) < 1e-3:
        raise FrameError(ErrorCode.INVALID, "q is no distribution: repeated ids, or a sum that is not 1")
    return Support(torch.tensor(list(part.ids)), logp)


def pack_verdict(verdict: acceptance.Verdict, drafts: int) -> schema.Answer:
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
    )
    return schema.Answer(verdict=frame)


def unpack_verdict(frame: schema.Verdict) -> acceptance.Verdict:
    return acceptance.Verdict(
        frame.round,
        frame.accepted,
        frame.next_token,
        tuple(frame.near_ties),
        frame.audited,
        frame.disagreed,
        frame.queue_tenths / TENTHS_PER_SECOND,
        frame.compute_tenths / TENTHS_PER_SECOND,
    )
