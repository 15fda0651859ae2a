"""The edge's state of one sequence on an LLM server: requests for rows, and the verdicts computed from them.

The server keeps no session. Each request contains the whole sequence, which the prefix cache makes cheap. The edge
keeps the tokens (`Session`) and records which replicas have the recording or may have cached unverified tokens.
"""

from __future__ import annotations

import base64
import io
import uuid
from collections.abc import Sequence
from dataclasses import replace

from outrider.config import GenerationSettings
from outrider.decoding.actions import Verify
from outrider.engines.base import Prompt
from outrider.errors import CloudRefused, PromptError, SettingsError
from outrider.prompts.audio import from_int16, grid_exponent, to_int16
from outrider.prompts.recordings import SAMPLE_RATE
from outrider.sampling.acceptance import Exact, RejectionSampling, Verdict, parse_acceptance_rule
from outrider.sampling.policy import Policy
from outrider.sampling.top_logprobs import NeedMoreLogprobs, TopLogprobs
from outrider.transport.byte_counts import ByteCounts
from outrider.transport.http_client import encode_json
from outrider.verifiers.base import ModelInfo, SessionParams
from outrider.verifiers.llm_server.backend import (
    ALL_LOGPROBS,
    Backend,
    CachedLogprobsMissing,
    Capabilities,
    LogprobsRequest,
    Media,
    MediaMissing,
)
from outrider.verifiers.llm_server.conversations import Conversations
from outrider.verifiers.llm_server.replicas import Replica, use_first_ready
from outrider.verifiers.retry import MIN_UPLOAD_RATE
from outrider.verifiers.session import ForwardPlan, Session

TOP_CONSTRAINED, TOP_GRAMMAR, TOP_NUCLEUS = 8, 20, 64  # entries per row in the first request
PREFILL_MIN = 512  # tokens before a first block; with more, a request of its own computes them
TOP_GROWTH, MAX_TOP = 4, 4096  # factor for the next request if they do not suffice; above MAX_TOP the whole row


class LlmServerSession:
    """The edge's half of one sequence. `verify` is a single attempt, in the connection's event loop.

    Raises:
        Retryable: no replica answered.
        CloudRefused and other OutriderErrors: a server refused the request, or cannot provide the rows.
    """

    def __init__(
        self,
        backend: Backend,
        replicas: Sequence[Replica],
        prompt: Prompt,
        params: SessionParams,
        target: ModelInfo,
        noise: float,
        conversations: Conversations,
    ) -> None:
        _check_prompt(prompt, params, target)
        settings = params.settings
        policy = Policy.build(settings, target.eos_ids, params.vocab_size, len(prompt.ids), params.grammar)
        self.session = Session(prompt.ids, len(prompt.ids), policy, parse_acceptance_rule(params.accept), noise)
        self.byte_counts = ByteCounts()
        self._backend, self._replicas, self._settings = backend, replicas, settings
        self._eos_ids = None if settings.ignore_eos else target.eos_ids
        self._top = _initial_top(settings)
        media = _media(prompt, target)
        self._conversation = conversations.take(prompt, media)
        kept = self._conversation.media
        self._media = None if media is None or kept is None else replace(media, uuid=kept.uuid)
        self._conversations = conversations
        self._key = self._conversation.key
        self._has_recording = self._conversation.has_recording
        self._prefilled: set[Replica] = set()  # replicas that have computed the tokens before the first block
        self._maybe_cached: set[Replica] = set()  # replicas that may have cached tokens without a verdict

    async def verify(self, request: Verify) -> Verdict:
        """Fetch the rows from the first replica that answers, and verify the block."""
        plan = self.session.prepare(request)
        if isinstance(plan, Verdict):
            return plan
        verdicts: list[Verdict] = []

        async def use(replica: Replica) -> None:
            verdicts.append(await self._verify_on(replica, plan))

        await use_first_ready(self._replicas, self._key, use)
        return verdicts[0]

    def close(self) -> None:
        """End the session. Its key is kept for the next turn of the conversation."""
        self._conversation.tokens = self.session.ids
        self._conversations.add(self._conversation)

    async def count_bytes(self) -> ByteCounts:
        """Return the byte counts, including all transport bytes that no session has claimed."""
        for replica in self._replicas:
            endpoint = replica.client.endpoint
            endpoint.accounting.assign_transport(self.byte_counts, endpoint.up, endpoint.down)
        return self.byte_counts

    async def _verify_on(self, replica: Replica, plan: ForwardPlan) -> Verdict:
        probed = [other.capabilities for other in self._replicas if other.capabilities is not None]
        capabilities = await replica.ensure_ready(next(iter(probed), None))
        check_settings(self._settings, capabilities, replica.name, self._backend)
        replica.warn_once(
            sampling_warning(self._settings, capabilities, self.session.vocab_size, replica.name, self._backend)
        )
        self.session.noise = max(self.session.noise, capabilities.noise)
        await self._prefill(replica, capabilities, plan)
        while True:
            rows = await self._fetch_logprobs(replica, capabilities, plan)
            try:
                verdict = self.session.judge(plan, rows)
            except NeedMoreLogprobs as shortage:
                self._increase_top(capabilities, shortage, replica.name)
                continue
            self._maybe_cached.discard(replica)
            return verdict

    async def _prefill(self, replica: Replica, capabilities: Capabilities, plan: ForwardPlan) -> None:
        """Let a replica compute a long text before its first block, if the answer would contain all rows of the text.

        The last token before the drafts is left out. If it were cached, the row after it would be missing.
        """
        is_new = capabilities.sends_computed_rows and replica not in self._prefilled
        length = len(plan.ids) - plan.rows
        if is_new and plan.rows > 1 and length >= PREFILL_MIN and self._media is None:
            await self._post(replica, capabilities, LogprobsRequest(plan.ids[:length], 1, 1, self._key))
        self._prefilled.add(replica)

    async def _fetch_logprobs(
        self, replica: Replica, capabilities: Capabilities, plan: ForwardPlan
    ) -> list[TopLogprobs]:
        """Return the rows. The request is repeated at most twice: without the prefix cache, or with the recording."""
        for _ in range(3):
            request = self._build_request(replica, capabilities, plan)
            self._maybe_cached.add(replica)
            self._conversation.sent = max(self._conversation.sent, len(plan.ids))
            try:
                rows = await self._post(replica, capabilities, request)
            except CachedLogprobsMissing:
                continue
            except MediaMissing:
                self._has_recording.discard(replica)
                continue
            self._has_recording.add(replica)
            return rows
        raise CloudRefused(f"{replica.name} does not send the rows of cached tokens")

    def _build_request(self, replica: Replica, capabilities: Capabilities, plan: ForwardPlan) -> LogprobsRequest:
        top = self._top if capabilities.top == ALL_LOGPROBS else min(self._top, capabilities.top)
        needs_sum = self._settings.logprobs is not None and not capabilities.normalised
        if capabilities.top == ALL_LOGPROBS and (needs_sum or top >= self.session.vocab_size):
            top = ALL_LOGPROBS
        media, skip_cache = self._media, replica in self._maybe_cached
        if media is not None and replica in self._has_recording:
            media = replace(media, url=None)
        return LogprobsRequest(plan.ids, plan.rows, top, self._key, skip_cache, media, self._eos_ids)

    async def _post(self, replica: Replica, capabilities: Capabilities, request: LogprobsRequest) -> list[TopLogprobs]:
        path, body = self._backend.build_request(request, capabilities)
        replica.warn_once(capabilities.warning)
        data, accounting = encode_json(body), replica.client.endpoint.accounting
        media = len(request.media.url) if request.media is not None and request.media.url is not None else 0
        cost = accounting.add_pending(len(data))  # keeps other sessions from claiming these bytes as transport
        try:
            reply = await replica.post(path, data, self._key, replica.deadline + media / MIN_UPLOAD_RATE)
        finally:
            accounting.remove_pending(cost)
        accounting.record(self.byte_counts, "media", media, up=True)
        accounting.record(self.byte_counts, "request", reply.up - media, up=True)
        accounting.record(self.byte_counts, "answer", reply.down, up=False)
        if reply.status == 200:
            return self._backend.parse_logprobs(reply.content, request, capabilities)
        error = self._backend.map_error(replica.name, reply)
        if reply.status >= 500:
            replica.mark_failed()
        raise error

    def _increase_top(self, capabilities: Capabilities, shortage: NeedMoreLogprobs, name: str) -> None:
        """Request more entries from now on, since the next rows are likely to need them too."""
        if self._top == ALL_LOGPROBS or (capabilities.top != ALL_LOGPROBS and self._top >= capabilities.top):
            hint = self._backend.more_hint(capabilities, TOP_GROWTH * capabilities.top)
            cause, remedy = "", "restrict sampling further (top_k, top_p, smaller biases)"
            if self._settings.grammar is not None and self._settings.temperature == 0:
                cause, remedy = ", since the grammar allows none of them", "describe the format in the prompt"
            raise CloudRefused(
                f"{name} sends {capabilities.top} entries of a row, which do not determine the token at position "
                f"{shortage.position}{cause}: {hint}, or {remedy}"
            )
        self._top *= TOP_GROWTH
        if self._top > MAX_TOP and capabilities.top == ALL_LOGPROBS:
            self._top = ALL_LOGPROBS


def check_settings(settings: GenerationSettings, capabilities: Capabilities, name: str, backend: Backend) -> None:
    """Refuse settings that the server's rows cannot support.

    Raises:
        SettingsError: sampling may choose any token of the vocabulary, a penalty needs logits, or a report needs more
            entries. The message names the change to make.
    """
    if settings.repetition_penalty != 1.0 and capabilities.normalised:
        message = f"repetition_penalty needs logits, and {name} sends log-probabilities: {backend.logits_hint}"
        raise SettingsError(message)
    if capabilities.top == ALL_LOGPROBS:
        return
    if settings.logprobs is not None and not capabilities.normalised:
        hint = backend.more_hint(capabilities, ALL_LOGPROBS)
        raise SettingsError(
            f"logprobs: {name} sends only {capabilities.top} logits of a row, without normalisation: {hint}"
        )
    if settings.logprobs is not None and settings.logprobs >= capabilities.top:
        hint = backend.more_hint(capabilities, settings.logprobs + 1)
        raise SettingsError(f"logprobs {settings.logprobs}: {name} sends {capabilities.top} entries of a row: {hint}")
    if settings.temperature == 0:
        return
    if settings.top_k >= capabilities.top:
        raise SettingsError(
            f"top_k {settings.top_k}: {name} sends {capabilities.top} entries of a row, which covers top_k up to "
            f"{capabilities.top - 1}; {backend.more_hint(capabilities, settings.top_k + 1)}"
        )
    if not settings.top_k and settings.top_p == 1.0 and settings.min_p == 0.0:
        raise SettingsError(
            f"temperature {settings.temperature:g} without top_k, top_p and min_p samples from the whole vocabulary: "
            f"{name} sends {capabilities.top} entries of a row; set top_k (up to "
            f"{capabilities.top - 1}), top_p or min_p, or {backend.more_hint(capabilities, ALL_LOGPROBS)}"
        )


def sampling_warning(
    settings: GenerationSettings, capabilities: Capabilities, vocab_size: int, name: str, backend: Backend
) -> str:
    """Return a warning if a row may have too few entries in the middle of an output, else an empty string."""
    has_all = capabilities.top == ALL_LOGPROBS or capabilities.top >= vocab_size
    if settings.temperature == 0 or settings.top_k or has_all:
        return ""
    which = "top_p" if settings.top_p < 1.0 else "min_p"
    hint = backend.more_hint(capabilities, ALL_LOGPROBS)
    return (
        f"{which} may not be determined by the {capabilities.top} entries of a row that {name} sends, and the output "
        f"then ends with an error: add top_k (up to {capabilities.top - 1}), or {hint}"
    )


def _check_prompt(prompt: Prompt, params: SessionParams, target: ModelInfo) -> None:
    if not isinstance(parse_acceptance_rule(params.accept), (Exact, RejectionSampling)):
        raise SettingsError(f"accept {params.accept}: {target.name} gives no whole rows; exact and residual work")
    if params.hides_audio or prompt.features is not None:
        raise SettingsError(f"privacy: {target.name} takes recordings only; our own cloud takes features or tokens")
    if prompt.audio is not None and target.placeholder is None:
        raise PromptError(f"{target.name}: the drafter has no placeholder token for a recording")


def _initial_top(settings: GenerationSettings) -> int:
    """Return the number of entries of a row for the first request, for sampling and for a report."""
    top = _sampling_top(settings)
    return top if settings.logprobs is None or top == ALL_LOGPROBS else max(top, settings.logprobs + 1)


def _sampling_top(settings: GenerationSettings) -> int:
    """Return the number of entries of a row that sampling needs at first. Greedy decoding needs the margin between two.

    If processors can raise logits, more entries are needed.
    """
    penalties = settings.frequency_penalty, settings.presence_penalty
    raises_logits = min(penalties) < 0 or any(bias > 0 for _, bias in settings.logit_bias)
    if settings.temperature == 0:
        if settings.grammar is not None:
            return TOP_GRAMMAR
        if raises_logits:
            return TOP_NUCLEUS
        bans = settings.no_repeat_ngram_size, settings.suppress_tokens, settings.min_new_tokens, settings.ignore_eos
        constrained = any((settings.repetition_penalty != 1.0, *penalties, settings.logit_bias, *bans))
        return TOP_CONSTRAINED if constrained else 2
    if settings.top_k:
        return max(settings.top_k + 2, TOP_NUCLEUS if raises_logits else TOP_CONSTRAINED)
    return TOP_NUCLEUS if settings.top_p < 1.0 or settings.min_p else ALL_LOGPROBS


def _media(prompt: Prompt, target: ModelInfo) -> Media | None:
    """Return the recording as a data URI: FLAC if 16-bit samples represent it exactly, else WAV with floats."""
    if prompt.audio is None or target.placeholder is None:
        return None
    import soundfile

    file = io.BytesIO()
    integers = to_int16(prompt.audio, 0)
    if grid_exponent(prompt.audio) == 0 and (from_int16(integers, 0) == prompt.audio).all():
        kind = "flac"
        soundfile.write(file, integers, SAMPLE_RATE, format="FLAC", subtype="PCM_16")
    else:
        kind = "wav"
        soundfile.write(file, prompt.audio, SAMPLE_RATE, format="WAV", subtype="FLOAT")
    url = f"data:audio/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
    return Media(uuid.uuid4().hex, url, target.placeholder, len(prompt.ids))
