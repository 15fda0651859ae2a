"""The drafter for an edge and a target with different tokenizers.

The model drafts in the edge's vocabulary, and the proposals are ids of the target, translated through text:

    target ids  →  text  →  edge ids  →  drafted edge ids  →  text  →  proposed target ids

Verdicts decide on target ids alone, so a wrong translation costs acceptance, never the exactness of the output. The
method is that of transformers' universal assisted generation. Source: Timor et al., "Accelerating LLM Inference with
Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies", 2025.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate, takewhile

from outrider.config import GenerationSettings
from outrider.decoding.actions import Draft, Proposal
from outrider.decoding.incremental_text import IncrementalDetokenizer
from outrider.edge.drafter import FLUSH_INTERVAL_S, Drafter
from outrider.edge.text_codec import TextCodec
from outrider.engines.prefix_cache import common_prefix
from outrider.sampling.policy import Policy

CONTEXT_TOKENS = 16  # tokens encoded again before new text, because its first token depends on them
RETOKENIZED = 4  # edge tokens before a change of the text that are encoded again with it
SEPARATOR = "\n"  # the context of a text that begins inside a token
LAST_WORD = re.compile(r"\s?[^\W\u2e80-\U0010ffff]*\Z")  # scripts without spaces, from U+2E80 on, have no words
EXTRA_DRAFTS = 8  # limit of edge tokens in one call that give no target token

EDGE_TOKENS = 4  # edge tokens per target token, so that the edge's length limits never apply before the target's

OpenModel = Callable[[list[int]], Drafter]  # opens the model's drafter on the first edge ids


class TranslatedDrafter:
    """Drafts target ids with a model of another vocabulary.

    codecs: those of edge and target. prompt_ids: target ids. policy: the target's. Tokens that it bans are not
    proposed. edge_eos_ids, target_eos_ids: end tokens. max_length: positions that the edge model holds, None without a
    limit. per_token: a proposal depends only on the tokens before it, not on the division into calls. Some edge tokens
    are then drafted twice.

    A proposal has the signals of the edge token that covers the end of its text. The tokens of the last word, and the
    last token in any case, may still change with the text that follows, so they are held back. An incomplete character
    is held back as well.
    """

    def __init__(
        self,
        codecs: tuple[TextCodec, TextCodec],
        prompt_ids: Seq[int],
        open_model: OpenModel,
        policy: Policy,
        *,
        edge_eos_ids: tuple[int, ...],
        target_eos_ids: tuple[int, ...],
        max_length: int | None = None,
        per_token: bool = False,
    ) -> None:
        self._edge_codec, self._target_codec = codecs
        self._policy, self._per_token = policy, per_token
        self._edge_eos_ids, self._target_eos_ids, self._max_length = edge_eos_ids, target_eos_ids, max_length
        self._target = IncrementalDetokenizer(self._target_codec.decode)
        self._edge = IncrementalDetokenizer(self._edge_codec.decode)
        self._leading = self._edge_codec.leading_ids()
        self._proposals: dict[int, Proposal] = {}  # by index into the edge ids
        self._source = ""  # the target's text when it was last encoded
        self._base = 0  # the number of edge ids that encode it
        self._end: Proposal | None = None  # a drafted edge token without text, which ends the draft
        self.seconds = 0.0  # of drafting and translation
        started = time.perf_counter()
        ids = self._encode(self._read(list(prompt_ids)))[:max_length] or [*edge_eos_ids, 0][:1]
        self._fixed = max(1, len(ids) - RETOKENIZED)  # length of the edge ids that are never encoded again
        self._append(ids)
        self._model = open_model(ids[: self._fixed])
        self._translation_seconds = time.perf_counter() - started  # seconds of translating the prompt

    @property
    def prefill_seconds(self) -> float:
        """Seconds of drafting until the first token."""
        return self._model.prefill_seconds

    def draft(self, ids: list[int], action: Draft) -> list[Proposal]:
        """Return up to action.count proposals that follow `ids`: fewer at an end token or after FLUSH_INTERVAL_S.

        Return none if no text fits. Edge tokens after the last proposal are kept for the next call.
        """
        started, ids = time.perf_counter() - self._translation_seconds, list(ids)
        self._translation_seconds = 0.0
        proposals = self._draft(ids, action.count, action)
        while self._per_token and proposals and len(proposals) < action.count:
            if proposals[-1].token in self._target_eos_ids:
                break
            following = [*ids, *(proposal.token for proposal in proposals)]
            if not (more := self._draft(following, 1, Draft(1, model_only=action.model_only))):
                break
            proposals += more
        self.seconds += time.perf_counter() - started
        return proposals

    def rollback_to(self, length: int) -> None:
        """Do nothing: `draft` compares the tokens with those of the last call."""

    @property
    def cached_len(self) -> int:
        """Number of edge tokens that the model's cache holds."""
        return self._model.cached_len

    def close(self, *, keep: bool = False) -> None:
        """Release the model's slot. keep: keep its KV cache for prompts that begin with the same tokens."""
        self._model.close(keep=keep)

    def _draft(self, ids: list[int], count: int, action: Draft) -> list[Proposal]:
        count, deadline = 1 if self._per_token else count, time.perf_counter() + FLUSH_INTERVAL_S
        text = self._read(ids)
        if self._per_token or action.leave_loop or not self._drafted_text().startswith(text):
            self._encode_edge(text)
        found, leave_loop, budget = self._align(text), action.leave_loop, 2 * count + EXTRA_DRAFTS
        while len(found) < count and budget > 0 and self._end is None:
            if found and time.perf_counter() > deadline:
                break
            wanted = 1 if self._per_token else min(count - len(found) + 1, budget)
            if not (drafted := self._extend(wanted, leave_loop=leave_loop)):
                break
            leave_loop, budget = False, budget - drafted
            found = self._align(text)
        proposals = self._allowed(ids, found[:count])
        if not proposals and action.model_only:
            proposals = self._unaligned(ids, text)
        if proposals and action.leave_loop:
            first = proposals[0]
            proposals[0] = Proposal(first.token, first.signals, left_loop=True)
        return proposals

    # The target's text --------------------------------------------------------------------------------------

    def _read(self, ids: Seq[int]) -> str:
        """Return the text of the target's ids. Only the tokens that are new since the last call are decoded."""
        known = self._target.ids
        if known != ids[: len(known)]:
            self._target.truncate(common_prefix(known, ids))
        for token in ids[len(known) :]:
            self._target.append(token)
        return self._target.text

    def _align(self, text: str, *, certain: bool = True) -> list[Proposal]:
        """Return the target ids of the drafted text after `text`. certain: without those that may still change."""
        tail = self._drafted_text()[len(text) :]
        attempts = (self._align_behind(context, tail) for context in (self._context(), SEPARATOR))
        found, fits = next((attempt for attempt in attempts if attempt is not None), ([], False))
        if fits and certain and self._end is None:
            word = LAST_WORD.search(tail)
            assert word is not None  # the pattern also matches the empty text
            found = [(token, end) for token, end in found[:-1] if end <= word.start()]
        proposals = [self._propose(token, end, len(text)) for token, end in found]
        return proposals + self._translated_end() if fits and certain and self._end is not None else proposals

    def _align_behind(self, context: str, tail: str) -> tuple[list[tuple[int, int]], bool] | None:
        """Return the tokens of `tail` after `context`, with the ends of their texts, and whether all of them fit.

        The list ends before the first token whose text differs. Return None if no token ends where `tail` begins.
        """
        transcript, text, position, fits = IncrementalDetokenizer(self._target_codec.decode), context + tail, 0, True
        found: list[tuple[int, int]] = []
        for token in self._target_codec.encode(text):
            piece = transcript.append(token)
            fits = text.startswith(piece, position)
            if not fits:
                break
            position += len(piece)
            found.append((token, position - len(context)))
        starts = [n + 1 for n, (_, end) in enumerate(found) if end == 0] if context else [0]
        if not starts:
            return None
        # Tokens that end inside a character share an end. Begin after the one that equals the target's last token.
        start = next((n for n in starts if n and found[n - 1][0] == self._target.ids[-1]), starts[0])
        return found[start:], fits

    def _context(self) -> str:
        """Return the text of the last target tokens, from the beginning of a word if possible.

        The space before that word is left out, because some tokenizers add one before a text, and others drop it.
        """
        pieces = self._target.pieces[-CONTEXT_TOKENS:]
        first = next((n for n, piece in enumerate(pieces[:-1]) if piece[:1].isspace()), 0)
        return "".join(pieces[first:]).removeprefix(" ")

    def _propose(self, token: int, end: int, text_length: int) -> Proposal:
        """Return the proposal of a target token. end: the end of its text, in characters of the drafted text."""
        end += text_length - len(self._source)
        ends = accumulate(map(len, self._edge.pieces[self._base :]))
        index = self._base + sum(1 for _ in takewhile(lambda covered: covered < end, ends))
        source = self._proposals.get(index)
        return Proposal(token, None if source is None else source.signals)

    def _translated_end(self) -> list[Proposal]:
        """Return the target's end token if the edge drafted its own."""
        assert self._end is not None
        if self._end.token not in self._edge_eos_ids or not self._target_eos_ids:
            return []
        namesakes = self._target_codec.encode(self._edge_codec.decode([self._end.token]))
        token = next((token for token in namesakes if token in self._target_eos_ids), self._target_eos_ids[0])
        return [Proposal(token, self._end.signals)]

    def _allowed(self, ids: list[int], proposals: list[Proposal]) -> list[Proposal]:
        """Return the proposals up to one that the target cannot emit, or to an end token."""
        allowed: list[Proposal] = []
        ids = list(ids)
        for proposal in proposals:
            token = proposal.token
            if token in self._policy.banned_ids(ids) or not self._policy.allows(ids, token):
                break
            allowed.append(proposal)
            ids.append(token)
            if token in self._target_eos_ids:
                break
        return allowed

    def _unaligned(self, ids: list[int], text: str) -> list[Proposal]:
        """Return one target token of the drafted text, for edge-only decoding, where no verdict adds a token."""
        tokens = [proposal.token for proposal in self._align(text, certain=False)]
        options = (self._allowed(ids, [Proposal(token)]) for token in (*tokens, *self._target_eos_ids))
        return next(filter(None, options), [])

    # The edge's ids -----------------------------------------------------------------------------------------

    def _drafted_text(self) -> str:
        """Return the target's text when it was last encoded, followed by the drafted text."""
        return self._source + "".join(self._edge.pieces[self._base :])

    def _encode_edge(self, text: str) -> None:
        """Replace the edge's ids by those of `text`. The longest common prefix of ids stays in the KV cache."""
        ids = self._encode(text) if self._per_token else self._reencode(text)
        fixed = self._edge.ids[: self._fixed]
        if ids[: self._fixed] != fixed:
            length = sum(map(len, self._edge.pieces[: self._fixed]))
            ids = fixed + self._edge_codec.encode(text[length:])
        common = common_prefix(self._edge.ids, ids)
        self._edge.truncate(common)
        self._append(ids[common:])
        self._model.rollback_to(max(1, min(common + 1, len(ids))))
        self._end, self._proposals = None, {}

    def _append(self, ids: list[int]) -> None:
        for token in ids:
            self._edge.append(token)
        self._source, self._base = self._target.text, len(self._edge.ids)

    def _encode(self, text: str) -> list[int]:
        ids = self._edge_codec.encode(text)
        return ids if ids[: len(self._leading)] == self._leading else [*self._leading, *ids]

    def _reencode(self, text: str) -> list[int]:
        """Return the edge ids of `text`. If possible, only the end that differs from the current text is encoded."""
        shared = common_prefix(self._edge.text, text)
        ends = [0, *accumulate(map(len, self._edge.pieces))]
        kept = max(0, sum(1 for _ in takewhile(lambda end: end <= shared, ends)) - 1 - RETOKENIZED)
        start = max(0, kept - CONTEXT_TOKENS)
        context = self._edge_codec.encode(text[ends[start] : ends[kept]])
        ids = self._edge_codec.encode(text[ends[start] :])
        if kept and ids[: len(context)] == context:
            return [*self._edge.ids[:kept], *ids[len(context) :]]
        return self._encode(text)

    def _extend(self, count: int, *, leave_loop: bool) -> int:
        """Draft up to `count` edge tokens. Return how many the model drafted, 0 if its context is full."""
        length = len(self._edge.ids)
        room = count if self._max_length is None else min(count, self._max_length - length)
        if room <= 0:
            return 0
        self._model.rollback_to(length)
        drafted = self._model.draft(self._edge.ids, Draft(room, leave_loop=leave_loop))
        for proposal in drafted:
            if proposal.token in self._edge_eos_ids or proposal.token in self._edge_codec.untranslatable:
                self._end = proposal
                break
            self._proposals[len(self._edge.ids)] = proposal
            self._edge.append(proposal.token)
        return len(drafted)


def edge_settings(settings: GenerationSettings, *, greedy: bool) -> GenerationSettings:
    """Return the settings of the edge's own sampling, without those about target ids or n-grams.

    A grammar is left out as well, because the translated proposals are checked against it. greedy: draft greedily,
    because every token is verified. The shared noise of sampling is keyed by target ids, so the most probable token is
    accepted most often.
    """
    if greedy:
        settings = replace(settings, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    return replace(
        settings,
        max_new_tokens=EDGE_TOKENS * settings.max_new_tokens,
        min_new_tokens=EDGE_TOKENS * settings.min_new_tokens,
        suppress_tokens=(),
        no_repeat_ngram_size=0,
        logit_bias=(),
        logprobs=None,
        grammar=None,
    )
