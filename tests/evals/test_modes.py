"""Modes on real models: equal tokens under one policy, times apart from results, limits that bind."""

from __future__ import annotations

import json
import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from transformers import GenerationConfig

from outrider import prompt_lookup
from outrider.api import local
from outrider.decoding.gate_file import GateFile, ModelId
from outrider.decoding.options import DecodingOptions
from outrider.errors import ContextError, SettingsError
from outrider.evals.baselines import Assistance
from outrider.evals.context import EvalContext, describe_run
from outrider.evals.manifest import Item
from outrider.evals.modes import NAMES, Setup
from outrider.evals.resource_limits import PinnedEngine, address_space, check_memory, check_threads
from outrider.evals.runner import answer
from tests.support.fakes import FarVerifier
from tests.support.tiny_models import clip, subword_tokenizer, tiny_engine
from tests.support.tokenized_models import model_of

pytestmark = pytest.mark.network

# Equal tokens -----------------------------------------------------------------------------------------------

TEXT = Item("t", prompt="the ion and")
CASES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 5},
    {"stop": ("e", "in")},
    {"sentences": 1},
    {"ignore_eos": True},
    {"suppress_tokens": (20, 21, 22), "logit_bias": {23: 2.5, 24: -3.0}},
]


def context(family: str, *, gate: str = "entropy:1.0", drafter: str | None = None, **generation: Any) -> EvalContext:
    tokenizer, eos = subword_tokenizer(), (3, 40, 41)
    target = tiny_engine(family, 3, eos=eos, tokenizer=tokenizer)
    draft = tiny_engine(drafter or family, 3, eos=eos, tokenizer=tokenizer, drift=0.05)
    setup = Setup({"max_new_tokens": 24, **generation}, DecodingOptions(k=4, gate=gate))
    return EvalContext(draft, local(target), setup, Assistance(tokens=5))


def answers(made: EvalContext, item: Item, names: tuple[str, ...] = NAMES) -> dict[str, dict[str, Any]]:
    modes, left_out = made.modes(names, [])
    assert not left_out
    return {mode.name: answer(mode, item)[0] for mode in modes}


@pytest.mark.parametrize("generation", CASES, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_all_modes_with_the_target_s_word_give_its_tokens(family: str, generation: dict[str, Any]) -> None:
    found = answers(context(family, **generation), TEXT)
    reference = found["cloud-only"]
    assert reference["token_ids"]
    for name in ("exact", "plain", "assisted"):
        for key in ("token_ids", "text", "finish_reason"):
            assert found[name].get(key) == reference[key], (name, key, found[name])
    assert [found[name]["guarantee"] for name in ("edge-only", "cloud-only", "exact", "plain")] == [
        "edge-only",
        "exact",
        "exact",
        "reference",
    ]


@pytest.mark.parametrize("family", ["omni", "qwen2-audio"])
@pytest.mark.parametrize("seconds", [0.7, 2.0])
def test_exact_modes_agree_on_recordings(tmp_path: Path, family: str, seconds: float) -> None:
    soundfile.write(tmp_path / "a.wav", clip(seconds), 16_000)
    found = answers(context(family), Item("a", tmp_path / "a.wav"))
    for name in ("exact", "plain", "assisted"):
        assert found[name].get("token_ids") == found["cloud-only"]["token_ids"], found[name]
        assert found[name]["prompt_tokens"] == found["cloud-only"]["prompt_tokens"]


@pytest.mark.parametrize("with_model", [True, False])
def test_prompt_lookup_drafts_in_the_modes_with_a_cloud(with_model: bool) -> None:
    made = context("llama", gate="always", ignore_eos=True)
    setup = replace(made.setup, options=replace(made.setup.options, accept="residual"))
    made = replace(made, draft=made.draft if with_model else None, lookup=prompt_lookup(), setup=setup)
    names = NAMES if with_model else ("cloud-only", "exact", "gated", "plain")
    found = answers(made, replace(TEXT, prompt="the ion and the ion and the ion and"), names)
    for name in ("exact", "gated", "plain"):
        assert found[name].get("token_ids") == found["cloud-only"]["token_ids"], found[name]
    assert found["exact"]["stats"]["drafted"] > 0
    assert made.models()["edge"]["lookup"] == {"min_ngram": 1, "max_ngram": 16}


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_pair_with_different_tokenizers_reads_prompts_in_the_ids_of_each_mode_s_model(is_remote: bool) -> None:
    text = " the quick brown fox"
    edge, target = model_of("byte level", "the lazy dog", text), model_of("llama", "the lazy dog", text)
    setup = Setup({"max_new_tokens": 40}, DecodingOptions(k=4))
    verifier = FarVerifier(local(target)) if is_remote else local(target)
    tokenizer = prompt_lookup(target.tokenizer) if is_remote else None
    made = EvalContext(edge, verifier, setup, Assistance(), target_tokenizer=tokenizer)
    modes, _ = made.modes(("edge-only", "cloud-only", "exact"), [])
    found = {mode.name: answer(mode, Item("t", prompt="the lazy dog"))[0] for mode in modes}
    assert {name: each["text"].strip() for name, each in found.items()} == dict.fromkeys(found, text.strip())
    assert found["exact"]["token_ids"] == found["cloud-only"]["token_ids"] != found["edge-only"]["token_ids"]
    assert found["exact"]["guarantee"] == "exact"
    assert made.models()["cloud"]["vocabulary"] == target.fingerprint


def test_an_assistant_that_cannot_hear_is_left_out_by_name() -> None:
    made = context("omni", drafter="qwen2")
    modes, left_out = made.modes(("plain", "assisted"), [])
    assert [mode.name for mode in modes] == ["plain"]
    assert "tiny qwen2 3 takes no audio" in left_out["assisted"]


def test_an_assistant_of_another_ear_skips_recordings_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soundfile.write(tmp_path / "a.wav", clip(0.7), 16_000)
    made = context("omni")
    (mode,), _ = made.modes(("assisted",), [])
    monkeypatch.setattr(made.draft.audio, "mels", 80)
    assert f"{made.draft.name} cannot take it" in answer(mode, Item("a", tmp_path / "a.wav"))[0]["skipped"]
    assert answer(mode, TEXT)[0]["token_ids"]


def test_other_vocabularies_leave_assisted_out() -> None:
    target, draft = tiny_engine("llama", 3, tokenizer=subword_tokenizer()), tiny_engine("llama", 1)
    made = EvalContext(draft, local(target), Setup(), Assistance())
    modes, left_out = made.modes(("plain", "assisted"), [])
    assert [mode.name for mode in modes] == ["plain"]
    assert "differ in vocabulary" in left_out["assisted"]
    with pytest.raises(SettingsError, match="differ in vocabulary"):
        made.modes(("plain", "assisted"), ["assisted"])


def test_answers_do_not_depend_on_what_was_answered_before() -> None:
    made = context("llama", temperature=0.9, top_k=20, min_p=0.01, seed=7)
    other = Item("other", messages=({"role": "user", "content": "ing and the"},))
    modes, _ = made.modes(NAMES, [])
    fresh = {mode.name: answer(mode, TEXT)[0] for mode in modes}
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    for mode in reversed(modes):
        assert "token_ids" in answer(mode, other)[0]
        assert answer(mode, TEXT)[0] == fresh[mode.name]
    assert torch.equal(torch.random.get_rng_state(), state), "torch's generator is the caller's"
    assert fresh["exact"]["token_ids"] == fresh["cloud-only"]["token_ids"]


def test_what_a_checkpoint_would_generate_with_is_neither_used_nor_lost() -> None:
    made = context("llama")
    before = answers(made, TEXT, ("plain", "assisted"))
    models = [made.target.model, made.draft.model]
    kept = [model.generation_config for model in models]
    strange = GenerationConfig(repetition_penalty=5.0, do_sample=True, temperature=3.0, num_assistant_tokens=1)
    try:
        for model in models:
            model.generation_config = strange
        assert answers(made, TEXT, ("plain", "assisted")) == before
        assert all(model.generation_config is strange for model in models)
        assert strange.num_assistant_tokens == 1
    finally:
        for model, config in zip(models, kept, strict=True):
            model.generation_config = config


def test_times_are_apart_from_results_and_fit_the_tokens() -> None:
    modes, _ = context("llama").modes(NAMES, [])
    for mode in modes:
        row, timing = answer(mode, TEXT)
        assert timing is not None
        assert len(timing["itl_s"]) == len(row["token_ids"]) - 1
        assert 0 < timing["ttft_s"] <= timing["total_s"]
        assert timing["ttft_s"] + sum(timing["itl_s"]) <= timing["total_s"] + 1e-3
        assert not [name for name in (*row, *row["stats"]) if name.endswith("_s") or "bytes" in name]
        if mode.name not in ("plain", "assisted"):
            assert "".join(row["pieces"]) == row["text"]
            assert len(row["sources"]) == len(row["token_ids"])


def test_prompts_that_do_not_fit_and_foreign_errors_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    made = context("llama", max_new_tokens=600)
    for name, row in answers(made, TEXT).items():
        assert row["error"]["type"] == ContextError.__name__, name
    (mode,), _ = context("llama").modes(("plain",), [])

    def broken(**_: Any) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(made.target.model, "generate", broken, raising=False)
    assert answer(mode, TEXT)[0]["error"]["type"] == "DecodingError"
    assert "ValueError: no such thing" in answer(mode, TEXT)[0]["error"]["message"]


def test_a_recording_that_is_none_fails_in_every_mode(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"no audio" * 99)
    for name, row in answers(context("omni"), Item("a", tmp_path / "a.wav")).items():
        assert row["error"]["type"] == "AudioError", name


def test_a_trace_is_the_target_s_output() -> None:
    made = context("llama")
    trace = made.tracer()(TEXT)
    assert trace["target"] == answers(made, TEXT)["cloud-only"]["token_ids"]
    assert len(trace["draft"]) == len(trace["target"])


@pytest.mark.parametrize("values", [{"tokens": 0}, {"schedule": "fast"}, {"confidence": 1.0}])
def test_assistance_that_transformers_would_not_take_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        Assistance(**values)


def test_run_json_tells_models_data_and_settings_apart(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", clip(0.7), 16_000)
    made, items = context("llama"), [TEXT, Item("a", tmp_path / "a.wav")]
    modes, _ = made.modes(NAMES, [])
    said = describe_run(made, "set", items, modes, {}, limits={})
    configuration = said["configuration"]
    assert configuration["generation"]["max_new_tokens"] == 24
    assert configuration["models"]["edge"]["identity"] != configuration["models"]["cloud"]["identity"]
    assert set(said["versions"]) == {"outrider", "python", "torch", "transformers"}
    assert said["hardware"]["cores"] >= 1
    soundfile.write(tmp_path / "a.wav", clip(0.8), 16_000)
    assert describe_run(made, "set", items, modes, {})["configuration"]["data"]["hash"] != configuration["data"]["hash"]


# Limits -----------------------------------------------------------------------------------------------------


def test_a_drafter_is_held_to_its_cores_and_nobody_else_is() -> None:
    everywhere, threads = os.sched_getaffinity(0), torch.get_num_threads()
    engine = tiny_engine("llama", 3, tokenizer=subword_tokenizer())
    held = PinnedEngine(lambda: engine, 1)
    assert held.affinity == {"cores": 1, "torch_threads": 1}
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (everywhere, threads)
    made = context("llama")
    limited = replace(made, draft=PinnedEngine(lambda: made.draft, 1))
    names = ("edge-only", "exact", "gated")
    assert answers(limited, TEXT, names) == answers(made, TEXT, names)


def test_a_drafter_computes_where_it_is_held() -> None:
    class Asking:
        device = "cpu"

        def forward(self, *_: Any) -> Any:
            return sorted(os.sched_getaffinity(0)), torch.get_num_threads()

    cores, threads = PinnedEngine(Asking, 1).forward(0, [1])
    assert (len(cores), threads) == (1, 1)


def test_threads_that_are_not_there_and_an_edge_elsewhere_are_refused() -> None:
    for count in (0, 4096):
        with pytest.raises(SettingsError, match=f"--edge-threads {count}: expected 1 to"):
            check_threads(count)

    class Elsewhere:
        device = "cuda:0"

    with pytest.raises(SettingsError, match="this one is on cuda:0"):
        PinnedEngine(Elsewhere, 1)


def test_an_address_space_binds_and_ends() -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + 2**30
    before = resource.getrlimit(resource.RLIMIT_AS)
    with address_space(limit) as found:
        assert found == limit
        with pytest.raises(MemoryError):
            np.empty(2**31, np.uint8)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    np.empty(2**31, np.uint8)
    with pytest.raises(SettingsError, match=r"maps \d+ before any model"), address_space(1000):
        pass


def test_memory_is_not_limited_for_an_edge_that_is_not_alone() -> None:
    with pytest.raises(SettingsError, match="the cloud model is in this process too"):
        check_memory(cloud="local", device="cpu")
    with pytest.raises(SettingsError, match="--device cpu"):
        check_memory(cloud="grpc", device="cuda:0")
    check_memory(cloud="none", device="cpu")


def test_a_calibrated_gate_s_audits_are_those_of_the_answer_alone(tmp_path: Path) -> None:
    """A decoder counts them over all its results; a run that was killed and goes on would count fewer."""
    made = context("llama", max_new_tokens=40, ignore_eos=True)
    edge, cloud = (ModelId(engine.name, engine.fingerprint) for engine in (made.draft, made.target))
    path = tmp_path / "gate.json"
    file = GateFile("entropy:9", 0.1, "tokens", 4, 9, 0.1, 0.5, 0.5, edge, cloud, made.settings)
    path.write_text(json.dumps(file.to_json()), encoding="utf-8")
    gated = replace(made, setup=replace(made.setup, options=DecodingOptions(k=4, gate=f"calibrated:{path}")))
    (mode,), _ = gated.modes(("gated",), [])
    first = answer(mode, TEXT)[0]
    assert first["risk"]["audited"] == first["stats"]["audited"] > 0
    assert answer(mode, TEXT)[0] == first
    said = describe_run(gated, "set", [TEXT], [mode], {})["configuration"]["gate_file"]
    path.write_text(path.read_text(encoding="utf-8") + " ", encoding="utf-8")
    assert describe_run(gated, "set", [TEXT], [mode], {})["configuration"]["gate_file"] != said
