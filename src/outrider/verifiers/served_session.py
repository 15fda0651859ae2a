"""One sequence on a serving engine: which rows are asked for, and the verdict that they give.

The server keeps no session: every request has the whole sequence in it, and its prefix cache makes that cheap. What
this side keeps are the tokens (`Session`), and what each replica has seen of them.
"""

from __future__ import annotations

import base64
import io
import uuid
from collections.abc import Sequence

from outrider.config import GenerationSettings
from outrider.core.acceptance import Exact, Residual, Verdict, rule
from outrider.core.actions import Verify
from outrider.core.partial import PartialRow, Uncovered
from outrider.core.policy import Policy
from outrider.engines.base import Prompt
from outrider.errors import CloudRefused, PromptError, SettingsError
from outrider.prompts.audio import exponent, from_steps, steps
from outrider.prompts.recordings import SAMPLE_RATE
from outrider.verifiers.base import Conditions, Description
from outrider.verifiers.replicas import Replica, first_ready
from outrider.verifiers.retrying import SLOWEST
from outrider.verifiers.server import WHOLE, Abilities, Ask, Dialect, Media, MediaMissing, Reread
from outrider.verifiers.session import Reading, Session
from outrider.wire.ledger import Ledger
from outrider.wire.web import encoded

CONSTRAINED, NUCLEUS = 8, 64  # entries of a row that are asked for first; more where these do not settle a token
GROWTH, LARGEST = 4, 4096  # beyond the largest, all entries are asked for


class ServedSession:
    """`verify` is one attempt, in the worker's loop:

    Raises:
        Again: no replica answered.
        CloudRefused and other OutriderErrors: a server says no, or cannot say what is asked.
    """

    def __init__(
        self,
        dialect: Dialect,
        replicas: Sequence[Replica],
        prompt: Prompt,
        conditions: Conditions,
        target: Description,
        noise: float,
    ) -> None:
        _check_prompt(prompt, conditions, target)
        settings = conditions.settings
        policy = Policy.build(settings, target.eos_ids, conditions.vocab_size, len(prompt.ids))
        self.session = Session(prompt.ids, len(prompt.ids), policy, rule(conditions.accept), noise)
        self.ledger = Ledger()
        self._dialect, self._replicas, self._settings = dialect, replicas, settings
        self._key = uuid.uuid4().hex  # nobody else's: what is cached under it can only be what we sent
        self._ends = None if settings.ignore_eos else target.eos_ids
        self._top = _first_top(settings)
        self._media = _media(prompt, target)
        self._heard: set[Replica] = set()  # those that have the recording
        self._unsettled: set[Replica] = set()  # those that may have read, and cached, what has no verdict yet

    async def verify(self, request: Verify) -> Verdict:
        reading = self.session.ask(request)
        if isinstance(reading, Verdict):
            return reading
        verdicts: list[Verdict] = []

        async def use(replica: Replica) -> None:
            verdicts.append(await self._judge(replica, reading))

        await first_ready(self._replicas, self._key, use)
        return verdicts[0]

    async def claim(self) -> Ledger:
        """Return the byte counts, with all transport that no session has claimed."""
        for replica in self._replicas:
            endpoint = replica.web.endpoint
            endpoint.accounting.claim_transport(self.ledger, endpoint.up, endpoint.down)
        return self.ledger

    async def _judge(self, replica: Replica, reading: Reading) -> Verdict:
        able = await replica.ready(next((other.able for other in self._replicas if other.able is not None), None))
        check_settings(self._settings, able, replica.name, self._dialect)
        replica.warn(doubt(self._settings, able, self.session.vocab_size, replica.name, self._dialect))
        self.session.noise = max(self.session.noise, able.noise)
        while True:
            rows = await self._read(replica, able, reading)
            try:
                verdict = self.session.judge(reading, rows)
            except Uncovered as lack:
                self._widen(able, lack, replica.name)
                continue
            self._unsettled.discard(replica)
            return verdict

    async def _read(self, replica: Replica, able: Abilities, reading: Reading) -> list[PartialRow]:
        """The rows, however often the server has to be told what it lacks: twice at most."""
        for _ in range(3):
            ask = self._ask(replica, able, reading)
            self._unsettled.add(replica)
            try:
                rows = await self._exchange(replica, able, ask)
            except Reread:
                continue
            except MediaMissing:
                self._heard.discard(replica)
                continue
            self._heard.add(replica)
            return rows
        raise CloudRefused(f"{replica.name} does not send the rows of what it has read")

    def _ask(self, replica: Replica, able: Abilities, reading: Reading) -> Ask:
        top = self._top if able.top == WHOLE else min(self._top, able.top)
        if able.top == WHOLE and top >= self.session.vocab_size:
            top = WHOLE
        fresh = replica in self._unsettled
        return Ask(reading.ids, reading.rows, top, self._key, fresh, self._recording(replica), self._ends)

    def _recording(self, replica: Replica) -> Media | None:
        media = self._media
        if media is None or replica not in self._heard:
            return media
        return Media(media.uuid, None, media.placeholder, media.until)

    async def _exchange(self, replica: Replica, able: Abilities, ask: Ask) -> list[PartialRow]:
        path, body = self._dialect.request(ask, able)
        replica.warn(able.caution)
        data, account = encoded(body), replica.web.endpoint.accounting
        media = len(ask.media.url) if ask.media is not None and ask.media.url is not None else 0
        cost = account.sent(len(data))  # nobody else's, while it is under way
        try:
            reply = await replica.post(path, data, self._key, replica.deadline + media / SLOWEST)
        finally:
            account.settled(cost)
        account.book(self.ledger, "media", media, up=True)
        account.book(self.ledger, "request", reply.up - media, up=True)
        account.book(self.ledger, "answer", reply.down, up=False)
        if reply.status == 200:
            return self._dialect.rows(reply.content, ask, able)
        error = self._dialect.failure(replica.name, reply)
        if reply.status >= 500:
            replica.fail()
        raise error

    def _widen(self, able: Abilities, lack: Uncovered, name: str) -> None:
        """Ask for more entries from now on: what was missing once will be again."""
        if self._top == WHOLE or (able.top != WHOLE and self._top >= able.top):
            raise CloudRefused(
                f"{name} sends {able.top} entries of a row, which do not settle the token at position {lack.position}: "
                f"{self._dialect.more.format(GROWTH * able.top)}, or restrict sampling further (top_k, top_p)"
            )
        self._top *= GROWTH
        if self._top > LARGEST and able.top == WHOLE:
            self._top = WHOLE


def check_settings(settings: GenerationSettings, able: Abilities, name: str, dialect: Dialect) -> None:
    """Refuse what rows of this kind can never settle, with what to change.

    Raises:
        SettingsError: the draw may fall on any token of the vocabulary, or a penalty needs logits.
    """
    if settings.repetition_penalty != 1.0 and able.normalised:
        raise SettingsError(f"repetition_penalty needs logits, and {name} sends log-probabilities: {dialect.logits}")
    if settings.temperature == 0 or able.top == WHOLE:
        return
    if settings.top_k >= able.top:
        raise SettingsError(
            f"top_k {settings.top_k}: {name} sends {able.top} entries of a row, which covers top_k up to "
            f"{able.top - 1}; {dialect.more.format(settings.top_k + 1)}"
        )
    if not settings.top_k and settings.top_p == 1.0 and settings.min_p == 0.0:
        raise SettingsError(
            f"sampling from the whole vocabulary: {name} sends {able.top} entries of a row; set top_k (up to "
            f"{able.top - 1}), top_p or min_p, or {dialect.more.format(-1)}"
        )


def doubt(settings: GenerationSettings, able: Abilities, vocab_size: int, name: str, dialect: Dialect) -> str:
    """What may turn out only in the middle of an output; empty where nothing may."""
    if settings.temperature == 0 or settings.top_k or able.top == WHOLE or able.top >= vocab_size:
        return ""
    which = "top_p" if settings.top_p < 1.0 else "min_p"
    return (
        f"{which} may not be settled by the {able.top} entries of a row that {name} sends, and the output then ends "
        f"with a refusal: add top_k (up to {able.top - 1}), or {dialect.more.format(-1)}"
    )


def _check_prompt(prompt: Prompt, conditions: Conditions, target: Description) -> None:
    if not isinstance(rule(conditions.accept), (Exact, Residual)):
        raise SettingsError(f"accept {conditions.accept}: {target.name} gives no whole rows; exact and residual work")
    if conditions.withheld or prompt.features is not None:
        raise SettingsError(f"privacy: {target.name} takes recordings only; our own cloud takes features or tokens")
    if prompt.audio is not None and target.placeholder is None:
        raise PromptError(f"{target.name}: the drafter does not say which token stands for a recording")


def _first_top(settings: GenerationSettings) -> int:
    """How many entries of a row to begin with. Two tell by how much a choice leads."""
    if settings.temperature == 0:
        constrained = settings.repetition_penalty != 1.0 or settings.no_repeat_ngram_size or settings.suppress_tokens
        return CONSTRAINED if constrained or settings.min_new_tokens or settings.ignore_eos else 2
    if settings.top_k:
        return max(settings.top_k + 2, CONSTRAINED)
    return NUCLEUS if settings.top_p < 1.0 or settings.min_p else WHOLE


def _media(prompt: Prompt, target: Description) -> Media | None:
    """The recording as a data URI: FLAC with 16 bits, which is lossless; WAV with floats where it is louder than ±1."""
    if prompt.audio is None or target.placeholder is None:
        return None
    import soundfile

    file = io.BytesIO()
    integers = steps(prompt.audio, 0)
    if exponent(prompt.audio) == 0 and (from_steps(integers, 0) == prompt.audio).all():
        kind = "flac"
        soundfile.write(file, integers, SAMPLE_RATE, format="FLAC", subtype="PCM_16")
    else:
        kind = "wav"
        soundfile.write(file, prompt.audio, SAMPLE_RATE, format="WAV", subtype="FLOAT")
    url = f"data:audio/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
    return Media(uuid.uuid4().hex, url, target.placeholder, len(prompt.ids))
