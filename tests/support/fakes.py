"""Models with known logits, and a verifier with known verdicts: what the tests of the loop are made of.

`ScriptedEngine` has the methods of an `Engine` and watches its own contract: whoever breaks it gets an
AssertionError where it happens. Its logits are a pure function of the prefix, so that plain decoding can be worked
out without it (`reference_output`), and a cache that holds the wrong tokens shows in the output.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Generator, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.config import GenerationSettings
from outrider.decoding.actions import Verify
from outrider.decoding.result import Result
from outrider.decoding.stopping import StopRules, find_finish_reason
from outrider.engines.base import Prompt, SequenceInput
from outrider.engines.prefix_cache import PrefixCache, same_media
from outrider.errors import CloudLost, StateError
from outrider.sampling.acceptance import Verdict
from outrider.sampling.policy import Policy
from outrider.transport.byte_counts import ByteCounts
from outrider.verifiers.base import ModelInfo, SessionParams, Verifier

Rows = Callable[[tuple[int, ...]], Tensor]  # prefix → float32 [V]


class HashRows:
    """Logits drawn from a normal distribution whose seed is the prefix (its last `memory` tokens, if given)."""

    def __init__(self, seed: int, vocab_size: int, spread: float = 2.0, memory: int | None = None) -> None:
        self.seed, self.vocab_size, self.spread, self.memory = seed, vocab_size, spread, memory
        self._rows_by_prefix: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, prefix: tuple[int, ...]) -> Tensor:
        if self.memory is not None:
            prefix = prefix[len(prefix) - self.memory :] if self.memory else ()
        if prefix not in self._rows_by_prefix:
            digest = hashlib.blake2b(repr((self.seed, prefix)).encode(), digest_size=8).digest()
            drawn = np.random.default_rng(int.from_bytes(digest, "little")).normal(size=self.vocab_size)
            self._rows_by_prefix[prefix] = torch.from_numpy(drawn * self.spread).float()
        return self._rows_by_prefix[prefix]


def blend(target: Rows, other: Rows, share: float) -> Rows:
    """A drafter's logits: the target's with a share of another's. 0 is a perfect drafter, 1 a stranger."""
    return lambda prefix: (1 - share) * target(prefix) + share * other(prefix)


def replay(prompt_length: int, output: Seq[int], vocab_size: int, *, tail: Seq[int] = (0,), lead: float = 30.0) -> Rows:
    """Logits of a model that says `output` after a prompt, whatever it is told in between; then `tail` for ever."""

    def rows(prefix: tuple[int, ...]) -> Tensor:
        n = len(prefix) - prompt_length
        token = output[n] if 0 <= n < len(output) else tail[(n - len(output)) % len(tail)]
        row = torch.linspace(0.0, 1.0, vocab_size)
        row[token] += lead
        return row

    return rows


@dataclass
class Slot:
    """One sequence in a scripted engine."""

    prompt: Prompt
    tokens: list[int] = field(default_factory=list)
    forgotten: dict[int, int] = field(default_factory=dict)  # position → token that truncate took away
    media_sent: int = 0

    def remembers(self, start: int, ids: Seq[int]) -> int:
        """How many of the tokens fed at `start` the cache had held before it was truncated there."""
        same = 0
        while same < len(ids) and self.forgotten.get(start + same) == ids[same]:
            same += 1
        if same < len(ids):
            self.forgotten = {}  # from the first other token on, everything is new
        return same


class ScriptedEngine:
    """An `Engine` whose logits are `logits_to_keep(prefix)`.

    Counters: `forwards`; `fed`, tokens; `refed`, tokens that were fed again though the cache had held them;
    `media_sent`, recordings that went through the encoder; `opened` and `open_slots`.
    """

    noise = 0.0
    max_length: int | None = None
    audio: Any = None
    position_bytes = 1

    def __init__(
        self,
        rows: Rows,
        vocab_size: int,
        *,
        eos_ids: Collection[int] = (),
        tokenizer: Any = None,
        name: str = "scripted",
        padding: int = 0,
    ) -> None:
        self.rows, self.vocab_size, self.eos_ids = rows, vocab_size, tuple(eos_ids)
        self.tokenizer, self.name, self.padding = tokenizer, name, padding
        self.row_count = vocab_size + padding
        self.opened: list[Prompt] = []
        self.slots: dict[int, Slot] = {}
        self.forwards = self.fed = self.refed = self.media_sent = 0
        self._reserved: int | None = None

    @property
    def fingerprint(self) -> str:
        return f"scripted-{self.vocab_size}"

    @property
    def identity(self) -> str:
        return f"{self.name}-weights"

    @property
    def cache_bytes(self) -> int:
        return sum(len(slot.tokens) for slot in self.slots.values()) * self.position_bytes

    def reserve(self, budget: int, max_length: int) -> int:
        """Slots of `max_length` positions within a budget; more may not be opened from now on."""
        assert not self.slots, "reserve memory before slots are opened"
        self.max_length = max_length if self.max_length is None else min(self.max_length, max_length)
        self._reserved = budget // (self.position_bytes * self.max_length)
        return self._reserved

    @property
    def open_slots(self) -> list[int]:
        return sorted(self.slots)

    def open(self, prompt: Prompt) -> int:
        assert prompt.ids, "a prompt without tokens reached the engine"
        assert self._reserved is None or len(self.slots) < self._reserved, "more slots than were reserved"
        self.opened.append(prompt)
        slot = len(self.opened) + 100  # never 0, never reused: a mixed-up number is seen at once
        self.slots[slot] = Slot(prompt)
        return slot

    def close(self, slot: int) -> None:
        self._find(slot)
        del self.slots[slot]

    def kv_len(self, slot: int) -> int:
        return len(self._find(slot).tokens)

    def truncate(self, slot: int, length: int) -> None:
        state = self._find(slot)
        assert 0 <= length <= len(state.tokens), f"truncate to {length} of {len(state.tokens)}"
        state.forgotten = dict(enumerate(state.tokens[length:], length))
        del state.tokens[length:]

    def forward(self, slot: int, ids: Seq[int], rows: int | None = None) -> Tensor:
        rows = len(ids) if rows is None else rows
        assert 0 < rows <= len(ids), f"{rows} rows wanted of {len(ids)} tokens"
        assert all(0 <= token < self.vocab_size + self.padding for token in ids), f"not tokens: {list(ids)}"
        state = self._find(slot)
        self._feed(state, ids)
        end = len(state.tokens)
        assert self._reserved is None or end <= (self.max_length or end), "a slot holds more than was reserved"
        known = [self.rows(tuple(state.tokens[:n])) for n in range(end - rows + 1, end + 1)]
        return torch.stack([torch.cat([row, torch.full((self.padding,), 99.0)]) for row in known])

    def forward_many(self, inputs: Seq[SequenceInput]) -> list[Tensor]:
        assert len({seq_input.slot for seq_input in inputs}) == len(inputs), "one slot twice in a batch"
        return [self.forward(seq_input.slot, seq_input.ids, seq_input.logits_to_keep) for seq_input in inputs]

    def _feed(self, state: Slot, ids: Seq[int]) -> None:
        start, prompt = len(state.tokens), state.prompt
        expected = prompt.ids[start : start + len(ids)]
        assert tuple(ids[: len(expected)]) == expected, "the slot was not given its prompt"
        self.refed += state.remembers(start, ids)
        if prompt.audio is not None and expected and not (start and state.media_sent):
            assert not state.media_sent, "a recording was encoded twice"
            state.media_sent += 1
            self.media_sent += 1
        state.tokens += ids
        self.forwards += 1
        self.fed += len(ids)

    def _find(self, slot: int) -> Slot:
        if slot not in self.slots:
            raise StateError(f"{self.name}: slot {slot} is not open")
        return self.slots[slot]


class ReusableEngine(ScriptedEngine):
    """A scripted engine that keeps the slots of finished sequences. A slot may only go on with what it holds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.prefix_cache = PrefixCache()

    def reopen(self, slot: int, prompt: Prompt) -> None:
        state = self._find(slot)
        held = len(state.tokens)
        assert tuple(state.tokens) == prompt.ids[:held], "a slot of another prefix"
        placeholder = None if self.audio is None else self.audio.placeholder
        if placeholder in state.tokens:
            assert same_media(state.prompt, prompt), "keys of another recording"
        else:
            state.media_sent = 0
        state.prompt = prompt


class ScriptedAudioEncoder:
    """How recordings enter a scripted engine: a placeholder for every 0.1 s, or for every frame of its features."""

    placeholder, mels, max_frames, max_seconds = 1, 4, 20, 2.0

    def prompt_tokens(self, prompt: Prompt) -> int:
        if prompt.audio is not None:
            return -(-len(prompt.audio) // 1600)
        return 0 if prompt.features is None else prompt.features.shape[1]


class OracleEngine(ScriptedEngine):
    """A drafter that knows the target's output and errs where it is told to.

    errors: positions of the output (0 is the first generated token) at which it proposes another token.
    """

    def __init__(
        self, prompt_length: int, output: Seq[int], vocab_size: int, errors: Collection[int] = (), **options: Any
    ) -> None:
        avoid = set(options.get("eos_ids", ()))
        said = [self._wrong(token, vocab_size, avoid) if n in errors else token for n, token in enumerate(output)]
        super().__init__(replay(prompt_length, said, vocab_size), vocab_size, name="oracle", **options)

    @staticmethod
    def _wrong(token: int, vocab_size: int, avoid: set[int]) -> int:
        others = (other % vocab_size for other in range(token + 1, token + vocab_size))
        return next((other for other in others if other not in avoid), (token + 1) % vocab_size)


class ScriptedVerifier:
    """A `Verifier` that knows the output that it wants: it accepts what agrees with that, and corrects the rest.

    It checks that every request continues where the last verdict ended. `requests` and `closed` are for the test.
    """

    def __init__(self, output: Seq[int], vocab_size: int, eos_ids: Collection[int] = ()) -> None:
        self.output, self.vocab_size, self.eos_ids = list(output), vocab_size, tuple(eos_ids)
        self.opened: list[tuple[Prompt, SessionParams]] = []
        self.requests: list[Verify] = []
        self.closed: list[int] = []
        self._length: dict[int, int] = {}

    def describe(self, edge: ModelInfo | None = None) -> ModelInfo:
        return ModelInfo(
            "scripted verifier", self.vocab_size, self.vocab_size, self.eos_ids, f"scripted-{self.vocab_size}", None
        )

    def open(self, prompt: Prompt, params: SessionParams) -> int:
        self.opened.append((prompt, params))
        self._length[len(self.opened)] = len(prompt.ids)
        return len(self.opened)

    def verify(self, session: int, request: Verify) -> Verdict:
        self.requests.append(request)
        known = self._length[session] + len(request.new_ids)
        assert known == request.base_length, f"base length {request.base_length}, but {known} tokens are known"
        at = request.base_length - len(self.opened[session - 1][0].ids)
        wanted = self.output[at : at + len(request.draft_ids)]
        pairs = zip(request.draft_ids, wanted, strict=False)
        accepted = next((n for n, (d, w) in enumerate(pairs) if d != w), len(wanted))
        token = self.output[at + accepted] if at + accepted < len(self.output) else 0
        self._length[session] = request.base_length + accepted + 1
        return Verdict(request.round, accepted, token)

    def generate(self, session: int) -> Iterator[Verdict]:
        for n in range(1, len(self.output) + 1):
            yield self.verify(session, Verify(n, self._length[session], (), ()))

    def close(self, session: int) -> None:
        self.closed.append(session)
        del self._length[session]


class LateVerdict(Future[Verdict]):
    """An answer that arrives after it was looked for so many times: a network without a clock."""

    def __init__(self, polls: int) -> None:
        super().__init__()
        self.polls = polls

    def done(self) -> bool:
        self.polls -= 1
        return self.polls < 0


class FarVerifier:
    """Another verifier behind a scripted network: its answers are late, and some calls are lost.

    polls: after how many looks the answers arrive, in turn. losses: numbers of the calls (0 is the first; open, verify,
    submit and each step of a stream are calls) that end in CloudLost. heard: a lost call reached the verifier all the
    same, and only its answer was lost. `calls` counts; `closed` lists sessions.
    """

    def __init__(
        self, inner: Verifier, *, polls: Seq[int] = (0,), losses: Collection[int] = (), heard: bool = False
    ) -> None:
        self.inner, self.losses, self.heard = inner, losses, heard
        self.calls = 0
        self.requests: list[Verify] = []
        self.closed: list[int] = []
        self._polls = cycle(polls)

    def describe(self, edge: ModelInfo | None = None) -> ModelInfo:
        return self.inner.describe()

    def open(self, prompt: Prompt, params: SessionParams) -> int:
        self._pass(None)
        return self.inner.open(prompt, params)

    def verify(self, session: int, request: Verify) -> Verdict:
        self.requests.append(request)
        self._pass(lambda: self.inner.verify(session, request))
        return self.inner.verify(session, request)

    def byte_counts(self, session: int) -> ByteCounts:
        return ByteCounts()

    def submit(self, session: int, request: Verify) -> Future[Verdict]:
        """A loss shows at once where the call's number is even, and in the future where it is odd."""
        if self.calls in self.losses and self.calls % 2 == 0:
            self.verify(session, request)
        future = LateVerdict(next(self._polls))
        try:
            future.set_result(self.verify(session, request))
        except CloudLost as lost:
            future.set_exception(lost)
        return future

    def generate(self, session: int) -> Iterator[Verdict]:
        stream = self.inner.generate(session)
        while True:
            self._pass(None)
            yield next(stream)

    def close(self, session: int) -> None:
        self.closed.append(session)
        self.inner.close(session)

    def _pass(self, reach: Callable[[], object] | None) -> None:
        number, self.calls = self.calls, self.calls + 1
        if number in self.losses:
            if self.heard and reach is not None:
                reach()
            raise CloudLost(f"call {number} was lost")


def reference_output(
    rows: Rows, prompt: Seq[int], vocab_size: int, *, eos: Collection[int] = (), **settings: Any
) -> list[int]:
    """What a model says alone: one token after another, without cache, blocks or verdicts."""
    wanted = GenerationSettings(**settings)
    policy = Policy.build(wanted, tuple(eos), vocab_size, len(prompt))
    rules = StopRules(wanted.max_new_tokens, tuple(eos))
    ids = list(prompt)
    while True:
        ids.append(policy.distribution(rows(tuple(ids)), ids, len(ids)).token)
        if find_finish_reason(rules, ids[len(prompt) :], None):
            return ids[len(prompt) :]


def greedy_tokens(rows: Rows, ids: Seq[int], count: int) -> list[int]:
    """Return the `count` tokens of highest logit that follow `ids`."""
    out = list(ids)
    for _ in range(count):
        out.append(int(rows(tuple(out)).argmax()))
    return out[len(ids) :]


def exhaust(stream: Generator[Any, None, Result]) -> Result:
    """Exhaust a stream."""
    while True:
        try:
            next(stream)
        except StopIteration as end:
            result: Result = end.value
            return result
