"""What to generate, drawn at random from a seed; what it comes to undisturbed; and what every result must fulfil."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

from outrider import Audio, Result, SpeculativeDecoder, local
from outrider.config import GenerationSettings
from outrider.decoding.sequence import Source
from outrider.engines.load import BUNDLED
from outrider.sampling.policy import Policy
from outrider.verifiers.base import Verifier
from tests.support.locked_engine import LockedEngine

CLIPS = json.loads((BUNDLED / "clips" / "clips.json").read_text(encoding="utf-8"))
TEXTS = ("the speaker talks slowly", "说话很慢, 嗓音低沉", "a calm voice", "他")
KS = (1, 2, 3, 4, 5, 6, 7, 8, "auto")
EXACT_GATES = ("always", "trigger:never", "trigger:entropy:1.0", "trigger:maxprob:0.8")
SKIP_GATES = ("entropy:1.5", "margin:1.0", "maxprob:0.6", "entropy:1.5|logprob:2")


@dataclass(frozen=True)
class Case:
    """One generation. options: of the decoder; settings: of `generate`. drafts: whether there is a drafter."""

    seed: int
    prompt: Any
    driver: str
    drafts: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def heard(self) -> bool:
        return isinstance(self.prompt, Audio)

    def decoder(self, edge: Any, verifier: Verifier, **remote: Any) -> SpeculativeDecoder:
        return SpeculativeDecoder(edge if self.drafts else None, verifier, **self.options, **remote)

    def undisturbed(self, edge: Any, target: Any) -> Result:
        """The same with the verifier in this process: no network, nobody else, one request after the other."""
        return self.decoder(edge, local(target)).generate(self.prompt, **self.settings)


def draw_case(seed: int, *, longest: int = 40, lossy: bool = True) -> Case:
    """The case of a seed. lossy: gates that skip, and residual acceptance, are among them."""
    random = Random(seed)
    drafts = random.random() < 0.9
    audio = drafts and random.random() < 0.5
    prompt = _clip(random) if audio else _text(random) if drafts else _ids(random)
    options: dict[str, Any] = {}
    settings = _settings(random, longest, texts=drafts)
    if drafts:
        options = {"k": random.choice(KS), "gate": random.choice(EXACT_GATES)}
        if lossy and random.random() < 0.35:
            options |= {"gate": random.choice(SKIP_GATES), "scope": random.choice(("block", "repair"))}
        elif lossy and random.random() < 0.3:
            options |= {"accept": random.choice(("residual", "rank:3", "typical:0.2"))}
        options["privacy"] = random.choice(("audio", "audio", "features", "tokens")) if audio else "audio"
    driver = random.choice(("sequential", "pipelined")) if drafts else "sequential"
    if options.get("accept") == "residual":
        settings["temperature"] = settings.get("temperature", 0.8)
    return Case(seed, prompt, driver, drafts, options, settings)


def _clip(random: Random) -> Audio:
    clip = random.choice(CLIPS)
    task = random.choice(("default", "detailed", "concise"))
    return Audio(BUNDLED / "clips" / clip["file"], lang=clip["lang"], task=task)


def _text(random: Random) -> Any:
    return random.choice(TEXTS) if random.random() < 0.5 else _ids(random)


def _ids(random: Random) -> list[int]:
    return [random.randrange(10, 1000) for _ in range(random.randint(1, 40))]


def _settings(random: Random, longest: int, *, texts: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {"max_new_tokens": random.randint(1, longest)}
    if random.random() < 0.5:
        settings |= {"temperature": random.choice((0.5, 1.0, 1.5)), "seed": random.getrandbits(64)}
        settings |= random.choice(({}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}))
    if random.random() < 0.3:
        settings["repetition_penalty"] = random.choice((0.9, 1.1, 1.3))
    if random.random() < 0.3:
        settings["no_repeat_ngram_size"] = random.choice((2, 3))
    if random.random() < 0.3:
        settings["ignore_eos"] = True
    if random.random() < 0.2:
        settings["min_new_tokens"] = settings["max_new_tokens"] // 2
    if texts and random.random() < 0.2:
        settings |= random.choice(({"sentences": 1}, {"stop": ["."]}, {"stop": ["。", "voice"]}))
    if random.random() < 0.2:
        settings["frequency_penalty"] = random.choice((-0.2, 0.5, 1.5))
    if random.random() < 0.1:
        settings["logit_bias"] = {random.randrange(10, 1000): random.choice((-5.0, 2.0)) for _ in range(5)}
    if random.random() < 0.1:
        settings["suppress_tokens"] = [random.randrange(10, 1000) for _ in range(5)]
    return settings


# What must hold -------------------------------------------------------------------------------------------------------


def comparable(result: Result) -> tuple[Any, ...]:
    """What a disturbance must not change. The text is the ids', and cloud-only decoding over a network has none."""
    by = [source.by_cloud for source in result.sources]
    return result.token_ids, by, result.finish_reason, result.guarantee, result.prompt_tokens


def check_counters(result: Result) -> None:
    stats, ledger = result.stats, result.ledger
    assert stats.cloud_tokens + stats.edge_tokens == len(result.token_ids) == len(result.sources)
    assert stats.accepted + stats.corrected + stats.bonus == stats.cloud_tokens
    assert stats.accepted <= stats.verified <= stats.drafted
    assert stats.corrected + stats.bonus <= stats.rounds <= stats.escalated <= stats.blocks
    assert sum(ledger["up"].values()) == stats.bytes_up
    assert sum(ledger["down"].values()) == stats.bytes_down
    assert stats.media_bytes_up == ledger["up"].get("media", 0)
    assert all(count > 0 for way in ledger.values() for count in way.values())


def check_edge_continuation(case: Case, result: Result, undisturbed: Result, edge: Any) -> None:
    """The cloud was lost: up to its last word the output is the undisturbed one's, from there on the edge's own."""
    sources, ids = result.sources, result.token_ids
    decided = max((n + 1 for n, source in enumerate(sources) if source.by_cloud), default=0)
    assert result.guarantee == "edge-only"
    assert result.stats.cloud_lost
    assert ids[:decided] == undisturbed.token_ids[:decided]
    choices = _own_choices(case, ids, edge)
    for n in range(decided, len(ids)):
        assert sources[n] is Source.SAMPLED or ids[n] == choices[n], f"token {n} is not what the edge says"


def _own_choices(case: Case, ids: list[int], edge: Any) -> list[int]:
    """What the edge says at every position of an output."""
    alone = SpeculativeDecoder(edge)
    prompt, settings = alone.encode(case.prompt), GenerationSettings.build(case.settings)
    policy = Policy.build(settings, edge.eos_ids, edge.vocab_size, len(prompt.ids))
    whole = [*prompt.ids, *ids]
    slot = edge.open(prompt)
    rows = edge.forward(slot, whole[:-1], len(ids))
    edge.close(slot)
    start = len(prompt.ids)
    return [policy.distribution(row, whole[: start + n], start + n).token for n, row in enumerate(rows)]


@cache
def undisturbed_result(seed: int, edge: LockedEngine, target: LockedEngine, longest: int = 40) -> Result:
    return draw_case(seed, longest=longest).undisturbed(edge, target)
