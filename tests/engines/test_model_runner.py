"""The GPU path: rows of transformers' forward, tokens of the path without a GPU, slots that stay in step."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers as tf

from outrider.api import SpeculativeDecoder, local
from outrider.config import GenerationSettings
from outrider.engines.base import LAST_SAMPLED, Prompt, SequenceInput
from outrider.engines.torch import fused_model as stack
from outrider.engines.torch import kernels, model_runner
from outrider.engines.torch.engine import TorchEngine
from outrider.engines.torch.fused_model import BatchShape, pack_batch, unsupported_reason
from outrider.engines.torch.model_runner import ModelRunner, split_prefill
from outrider.errors import DecodingError
from outrider.sampling.policy import Policy
from tests.support.tiny_models import AUDIO, clip
from tests.support.triton_interpreter import CONFIGS, VOCAB, Eager, audio_engine, fuse, fused, model

pytestmark = [
    pytest.mark.kernels,
    # What stands in padding is whatever memory held.
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "constrained": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 4, "suppress_tokens": [5]},
    "penalised": {"frequency_penalty": 0.7, "presence_penalty": -0.4, "logit_bias": {3: 2.0, 9: -4.0}},
    "sampled": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 3},
}


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(1, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def policy(**settings: object) -> Policy:
    return Policy.build(GenerationSettings.build(settings), (), VOCAB, 1)


def token_ids(engine: TorchEngine, slot: int, count: int) -> list[int]:
    cache = engine._cache
    return cache.token_ids(torch.tensor([cache.base(slot)]), count)[0].tolist()


@pytest.mark.parametrize("kind", CONFIGS)
def test_rows_are_those_of_a_plain_forward(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide and narrow, ragged, rolled back, beside another slot, across a growth of the cache."""
    made = model(kind)
    one, two = ids(44, 1), ids(30, 2)
    with torch.no_grad():
        plain = [made(input_ids=torch.tensor([tokens]), use_cache=False).logits[0] for tokens in (one, two)]
    engine = fused(made, monkeypatch)
    a, b = (engine.open(Prompt((1,))) for _ in range(2))

    def check(feeds: list[SequenceInput]) -> None:
        ends = {feed.slot: engine.kv_len(feed.slot) + len(feed.ids) for feed in feeds}
        for feed, rows in zip(feeds, engine.forward_many(feeds), strict=True):
            end = ends[feed.slot]
            expected = plain[0 if feed.slot == a else 1][end - feed.logits_to_keep : end]
            assert torch.allclose(rows, expected, atol=1e-4)

    check([SequenceInput(a, one[:20], 3)])
    check([SequenceInput(a, one[20:21], 1), SequenceInput(b, two[:3], 3)])
    engine.forward(a, [9, 9, 9])
    engine.truncate(a, 18)
    check([SequenceInput(b, two[3:5], 2)])
    check([SequenceInput(a, one[18:24], 6), SequenceInput(b, two[5:6], 1)])
    check([SequenceInput(a, one[24:44], 1)])
    assert token_ids(engine, a, 44) == one


def test_one_chunk_of_keys_needs_no_bringing_together(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    tokens = ids(12)
    with torch.no_grad():
        plain = made(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    engine = fused(made, monkeypatch)
    monkeypatch.setattr(stack, "TARGET_PROGRAMS", 1)
    slot = engine.open(Prompt((1,)))
    assert torch.allclose(engine.forward(slot, tokens), plain, atol=1e-4)


@pytest.mark.parametrize("case", SETTINGS)
def test_tokens_are_those_of_the_path_without_a_gpu(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted in one go, judged by picks, rolled back in between."""
    monkeypatch.setattr(kernels, "SKINNY_TOKENS", 0)  # each stripe would be a program; test_kernels.py has those
    prompt, settings = ids(9), {"max_new_tokens": 6, "ignore_eos": True, **SETTINGS[case]}
    plain = SpeculativeDecoder(None, local(TorchEngine(model()))).generate(prompt, **settings)
    drafter, target = fused(model(disturbed=0.04), monkeypatch), fused(model(), monkeypatch)
    decoder = SpeculativeDecoder(drafter, local(target), k=3, gate="trigger:entropy:0.5")  # which needs signals
    result = decoder.generate(prompt, **settings)
    assert result.token_ids == plain.token_ids
    assert result.guarantee == "exact"
    alone = SpeculativeDecoder(fused(model(), monkeypatch), k=4).generate(prompt, **settings)
    assert alone.token_ids == SpeculativeDecoder(TorchEngine(model()), k=4).generate(prompt, **settings).token_ids


def test_sessions_of_different_settings_are_chosen_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SKINNY_TOKENS", 0)
    engine, plain = fused(model(), monkeypatch), TorchEngine(model())
    policies = [policy(**SETTINGS[name]) for name in (*SETTINGS, "greedy")]
    prompts = [ids(5 + n, n) for n, _ in enumerate(policies)]
    feeds = [SequenceInput(engine.open(Prompt((1,))), tokens, 2) for tokens in prompts]
    chosen = engine.sample_many(feeds, policies)
    for tokens, own, picks in zip(prompts, policies, chosen, strict=True):
        slot = plain.open(Prompt((1,)))
        rows = plain.forward(slot, tokens, 2)
        expected = [own.distribution(rows[n], tokens, len(tokens) - 1 + n) for n in range(2)]
        assert [pick.token for pick in picks] == [row.token for row in expected]
        assert [pick.top2_margin for pick in picks] == pytest.approx([row.top2_margin for row in expected], abs=1e-3)


@pytest.mark.parametrize("case", SETTINGS)
def test_a_launch_continues_from_tokens_that_the_host_has_not_read(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Across a move of the cache, beside another slot, and in batches above the limit of tokens."""
    monkeypatch.setattr(kernels, "SKINNY_TOKENS", 0)
    engine, plain = fused(model(), monkeypatch), fused(model(), monkeypatch)
    prompts, own = [ids(29), ids(4, 1)], policy(**SETTINGS[case])
    expected = []
    for prompt in prompts:
        slot, tokens = plain.open(Prompt((1,))), list(prompt)
        for _ in range(5):
            ((pick,),) = plain.sample_many([SequenceInput(slot, tokens[plain.kv_len(slot) :], 1)], [own])
            tokens.append(pick.token)
        expected.append(tokens[len(prompt) :])
    slots = [engine.open(Prompt((1,))) for _ in prompts]
    pending = [engine.launch([SequenceInput(s, p, 1) for s, p in zip(slots, prompts, strict=True)], [own] * 2)]
    engine.open(Prompt((1,)))  # the buffers grow
    for n in range(4):
        monkeypatch.setattr(model_runner, "MAX_TOKENS", 512 if n < 3 else 1)
        pending.append(engine.launch([SequenceInput(slot, (LAST_SAMPLED,), 1) for slot in reversed(slots)], [own] * 2))
    found = [[rows[0].token for rows in each.result()] for each in pending]
    assert [list(column) for column in zip(*(found[:1] + [row[::-1] for row in found[1:]]), strict=True)] == expected
    assert token_ids(engine, slots[0], 33)[29:] == expected[0][:4]


def test_a_session_that_has_no_token_left_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SKINNY_TOKENS", 0)
    engine = fused(model(), monkeypatch)
    feeds = [SequenceInput(engine.open(Prompt((1,))), ids(4, n), 1) for n in range(2)]
    (good,), (bad,) = engine.sample_many(feeds, [policy(), policy(suppress_tokens=list(range(VOCAB)))])
    assert good.validated(4).token in range(VOCAB)
    with pytest.raises(DecodingError, match="position 4"):
        bad.validated(4)


def test_what_is_drafted_behind_an_eos_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SKINNY_TOKENS", 0)
    prompt = ids(9)
    free = SpeculativeDecoder(TorchEngine(model()), k=4).generate(prompt, max_new_tokens=6, ignore_eos=True)
    eos = free.token_ids[2]
    monkeypatch.setattr(TorchEngine, "eos_ids", property(lambda self: (eos,), lambda self, value: None), raising=False)
    result = SpeculativeDecoder(fused(model(), monkeypatch), k=5).generate(prompt, max_new_tokens=6)
    assert result.token_ids == free.token_ids[: free.token_ids.index(eos) + 1]
    assert result.finish_reason == "eos"


@pytest.mark.parametrize("captured", [8, 64])
def test_a_long_prefill_in_parts_gives_the_logits_of_a_plain_forward(
    captured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside another slot, with more positions to keep than a part has, and with more than a graph takes."""
    monkeypatch.setattr(kernels, "SKINNY_TOKENS", 0)
    monkeypatch.setattr(model_runner, "MAX_TOKENS", 32)
    monkeypatch.setattr(model_runner, "MAX_CAPTURED_TOKENS", captured)
    made = model()
    one, two = ids(75, 1), ids(50, 2)
    with torch.no_grad():
        plain = [made(input_ids=torch.tensor([tokens]), use_cache=False).logits[0] for tokens in (one, two)]
    engine = fused(made, monkeypatch)
    feeds = [SequenceInput(engine.open(Prompt((1,))), tokens, kept) for tokens, kept in ((one, 3), (two, 40))]
    for feed, rows, expected in zip(feeds, engine.forward_many(feeds), plain, strict=True):
        assert torch.allclose(rows, expected[-feed.logits_to_keep :], atol=1e-4)
        assert engine.kv_len(feed.slot) == len(feed.ids)


def test_a_prefill_is_split_into_even_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "MAX_TOKENS", 32)

    def parts(*sizes: tuple[int, int]) -> list[list[tuple[int, int, int]]]:
        inputs = [SequenceInput(slot, [slot] * count, kept) for slot, (count, kept) in enumerate(sizes)]
        return [[(each.slot, len(each.ids), each.logits_to_keep) for each in part] for part in split_prefill(inputs)]

    assert parts((32, 5)) == [[(0, 32, 5)]]
    assert parts((33, 5)) == [[(0, 16, 1)], [(0, 17, 5)]]
    assert parts((70, 1), (6, 6)) == [[(0, 25, 1)], [(0, 25, 1)], [(0, 20, 1), (1, 6, 6)]]
    assert parts((40, 40)) == [[(0, 40, 40)]]


def test_constraints_on_the_device_read_a_long_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SKINNY_TOKENS", 0)
    monkeypatch.setattr(model_runner, "MAX_CAPTURED_TOKENS", 8)
    engine, plain = fused(model(), monkeypatch), TorchEngine(model())
    tokens, own = ids(20), policy(**SETTINGS["constrained"])
    slot, other = engine.open(Prompt((1,))), plain.open(Prompt((1,)))
    expected = own.distribution(plain.forward(other, tokens, 1)[0], tokens, 20).token
    assert [proposal.token for proposal in engine.draft(slot, tokens, 1, own, with_signals=False)] == [expected]
    assert token_ids(engine, slot, 20) == tokens


def test_a_recording_is_read_by_the_fused_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts that begin within the recording, beside a slot without one."""
    monkeypatch.setattr(kernels, "SKINNY_TOKENS", 0)
    plain, engine = audio_engine(), audio_engine()
    fuse(engine, monkeypatch)
    monkeypatch.setattr(engine, "_forward_transformers", None)
    wave = clip(1.0)
    prompt = Prompt((5, 6, *[AUDIO] * plain.audio.token_count(len(wave)), 7, 8), wave)
    other, text = ids(9), Prompt((1,))
    expected = plain.forward_many(
        [SequenceInput(plain.open(prompt), prompt.ids, 3), SequenceInput(plain.open(text), other, 2)]
    )
    slot = engine.open(prompt)
    engine.forward(slot, prompt.ids[:10], 1)
    found = engine.forward_many([SequenceInput(engine.open(text), other, 2), SequenceInput(slot, prompt.ids[10:], 3)])
    assert torch.allclose(found[1], expected[0], atol=1e-4)
    assert torch.allclose(found[0], expected[1], atol=1e-4)


def test_graphs_outlive_a_move_of_the_cache_until_its_tables_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fused(model(), monkeypatch)
    graphs = Eager()
    monkeypatch.setattr(engine, "_runner", ModelRunner(engine._runner._model, engine.device, graphs))  # type: ignore[union-attr]
    slot, other = engine.open(Prompt((1,))), engine.open(Prompt((1,)))
    engine.forward(slot, ids(3))
    kept = dict(graphs.found)
    engine.forward(slot, ids(3, 1))
    assert all(graphs.found[key] is run for key, run in kept.items())
    buffers, total = engine._cache.buffers, engine._cache.layout.total
    engine.forward(other, ids(100, 2), 1)
    engine.truncate(slot, 0)
    rows = engine.forward(slot, ids(3, 3))
    engine._cache._move_to(engine._cache.layout.packed({slot: 3, other: 100}, total + 64))
    assert all(now is not before for now, before in zip(engine._cache.buffers, buffers, strict=True))
    engine.truncate(slot, 0)
    assert torch.equal(engine.forward(slot, ids(3, 3)), rows)
    assert all(graphs.found[key] is run for key, run in kept.items())
    engine.forward(other, ids(400, 4), 1)  # beyond the rotary tables
    assert not any(graphs.found.get(key) is run for key, run in kept.items())


def test_a_batch_is_described_flat() -> None:
    feeds = [SequenceInput(3, [10, 11, 12], 2), SequenceInput(0, [20], 1)]
    shape = BatchShape.of([3, 1], 3, 40)
    batch = stack.Batch.allocate(torch.device("cpu"), shape)
    batch.all.copy_(pack_batch(shape, feeds, [5, 7], [300, 0]))
    assert (shape.tokens, shape.sequences, shape.longest, shape.rows, shape.span) == (4, 2, 4, 4, 256)
    assert batch.ids.tolist() == [10, 11, 12, 20]
    assert batch.positions.tolist() == [5, 6, 7, 7]
    assert batch.token_bases.tolist() == [300, 300, 300, 0]
    assert (batch.firsts.tolist(), batch.counts.tolist()) == ([0, 3], [3, 1])
    assert (batch.starts.tolist(), batch.bases.tolist()) == ([5, 7], [300, 0])
    assert batch.kept.tolist() == [1, 2, 3, 0]
    batch.all.copy_(pack_batch(shape, [], [], []))
    assert batch.token_bases.tolist() == [-1] * 4
    assert batch.counts.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (tf.Qwen2Config(num_hidden_layers=1, hidden_size=64, num_attention_heads=2), None),
        (tf.GPT2Config(n_layer=1, n_embd=64, n_head=2), "gpt2"),
        (tf.MistralConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2, sliding_window=8), "sliding"),
        (tf.Qwen2Config(num_hidden_layers=1, hidden_size=96, num_attention_heads=2), "power of two"),
        (tf.LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2, hidden_act="gelu"), "gelu"),
        (tf.LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2, attention_bias=True), "biases"),
        (tf.LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2, mlp_bias=True), "biases"),
    ],
)
def test_what_cannot_be_fused_is_named(config: Any, reason: str | None) -> None:
    config.vocab_size, config.intermediate_size = 32, 64
    with torch.device("meta"):
        made = tf.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    found = unsupported_reason(made, made.base_model, made.get_output_embeddings(), config)
    assert found is None if reason is None else reason in str(found)
    assert (
        "float32" in str(unsupported_reason(made.float(), made.base_model, made.get_output_embeddings(), config))
        or reason
    )


def test_a_cpu_is_no_gpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not TorchEngine(model()).samples_on_device
    assert not caplog.records
