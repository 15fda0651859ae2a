"""`for_transformers`: what it refuses and when, what it keeps, and what it leaves behind."""

from __future__ import annotations

import copy
import gc
import importlib.util
import inspect
import weakref
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.cache_utils import DynamicCache
from transformers.generation import logits_process as processors
from transformers.generation.streamers import BaseStreamer

from outrider import (
    InputError,
    ModelError,
    PromptError,
    SettingsError,
    VocabularyMismatch,
    for_transformers,
    load_engine,
)
from outrider.engines.base import Prompt
from outrider.integrations.transformers import engines, generation
from outrider.integrations.transformers.engines import EngineView, exclusive, get_engine
from outrider.integrations.transformers.generation import CustomGenerate
from outrider.integrations.transformers.settings import _CONVERTERS as read_by_outrider
from tests.support.tiny_text_models import VOCAB, model

pytestmark = pytest.mark.network

IDS = torch.tensor([[2, 33, 44, 55]])
TARGET, DRAFT = model("qwen2"), model("llama", 1)
SPECULATE = for_transformers(DRAFT, k=3)


def call(custom: Any = SPECULATE, target: Any = TARGET, ids: torch.Tensor = IDS, **options: Any) -> Any:
    """Generate with a loop's own `generate`, or with another function as `custom_generate`."""
    options = {"input_ids": ids, "max_new_tokens": 8, "do_sample": False, **options}
    if isinstance(custom, CustomGenerate):
        return custom.generate(target, **options)
    return target.generate(custom_generate=custom, **options)


class Own(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


class OwnPenalty(processors.RepetitionPenaltyLogitsProcessor):
    pass


def chain(*made: Any) -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList(made)}


CACHE = "cache" if "cache" in inspect.signature(TARGET.forward).parameters else "past_key_values"
SAMPLED = {"do_sample": True}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("num_beams=2", {"num_beams": 2}),
    ("num_return_sequences=2", {"num_return_sequences": 2, **SAMPLED}),
    ("prompt_lookup_num_tokens", {"prompt_lookup_num_tokens": 3}),
    ("assistant_model", {"assistant_model": DRAFT}),
    ("UnbatchedClassifierFree", {"guidance_scale": 1.5}),
    ("sequence_bias.*single tokens", {"sequence_bias": [[[3], -1.0], [[4, 5], 1.0]]}),
    ("logit_bias.*between -100 and 100", {"sequence_bias": [[[3], -1000.0]]}),
    (
        "SequenceBias.*after the repetition penalty",
        {**chain(processors.SequenceBiasLogitsProcessor({(3,): 1.0})), "repetition_penalty": 1.1},
    ),
    ("NoBadWords", {"bad_words_ids": [[3]]}),
    ("SuppressTokensAtBegin", {"begin_suppress_tokens": [3]}),
    ("ForcedBOS", {"forced_bos_token_id": 3}),
    ("ForcedEOS", {"forced_eos_token_id": 3}),
    ("EncoderRepetitionPenalty", {"encoder_repetition_penalty": 1.2}),
    ("EncoderNoRepeatNGram", {"encoder_no_repeat_ngram_size": 2}),
    ("PrefixConstrained", {"prefix_allowed_tokens_fn": lambda batch, ids: [3]}),
    ("ExponentialDecay", {"exponential_decay_length_penalty": (2, 1.1), "eos_token_id": 5}),
    ("InfNanRemove", {"remove_invalid_values": True}),
    ("TypicalLogits", {"typical_p": 0.9, **SAMPLED}),
    ("EpsilonLogits", {"epsilon_cutoff": 0.01, **SAMPLED}),
    ("EtaLogits", {"eta_cutoff": 0.01, **SAMPLED}),
    ("Own", chain(Own())),
    ("OwnPenalty", chain(OwnPenalty(1.1))),
    ("prompt_ignore_length", chain(processors.RepetitionPenaltyLogitsProcessor(1.1, 2))),
    ("TopKLogitsWarper needs do_sample", chain(processors.TopKLogitsWarper(5))),
    ("filter_value", {**chain(processors.TopKLogitsWarper(5, filter_value=-1.0)), **SAMPLED}),
    ("min_tokens_to_keep", {**chain(processors.TopPLogitsWarper(0.5, min_tokens_to_keep=2)), **SAMPLED}),
    ("after TopK", {**chain(processors.TopKLogitsWarper(5)), "top_k": 0, "temperature": 0.5, **SAMPLED}),
    ("is there twice", chain(Twin := processors.NoRepeatNGramLogitsProcessor(2), copy.copy(Twin))),
    ("eos_token_id", {**chain(processors.MinLengthLogitsProcessor(9, 7)), "eos_token_id": 5}),
    ("output_scores", {"output_scores": True, "return_dict_in_generate": True}),
    ("output_logits", {"output_logits": True, "return_dict_in_generate": True}),
    ("a batch of 2", {"ids": IDS.repeat(2, 1)}),
    ("without padding", {"attention_mask": torch.tensor([[0, 1, 1, 1]])}),
    ("position_ids", {"position_ids": torch.tensor([[3, 4, 5, 6]])}),
    ("cache|past_key_values", {CACHE: DynamicCache()}),
    ("stop_strings need a tokenizer", {"stop_strings": ["a"]}),
    ("synced_gpus", {"synced_gpus": True}),
    ("repetition_penalty", {"repetition_penalty": 1e6}),
]


@pytest.mark.parametrize(("name", "options"), REFUSED, ids=[name for name, _ in REFUSED])
def test_what_would_change_the_output_is_refused_by_name_before_any_work(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def worked(*_: Any) -> None:
        raise AssertionError("the target was touched")

    monkeypatch.setattr(generation, "get_engine", worked)
    with pytest.raises(InputError, match=name):
        call(**options)


def test_embeddings_are_refused() -> None:
    embeds = TARGET.get_input_embeddings()(IDS)
    with pytest.raises(PromptError, match="inputs_embeds"):
        TARGET.generate(inputs_embeds=embeds, max_new_tokens=4, custom_generate=SPECULATE)


def test_what_is_read_is_what_generate_makes() -> None:
    """A processor that transformers renames would be refused: this says so first."""
    source = inspect.getsource(GenerationMixin._get_logits_processor)
    for kind in read_by_outrider:
        assert f"{kind.__name__}(" in source


@pytest.mark.parametrize("options", [{"k": 0}, {"gate": "sometimes"}, {"accept": "maybe"}, {"scope": "word"}])
def test_bad_options_are_refused_when_it_is_made(options: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        for_transformers(DRAFT, **options)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ModelError, match="not int"):
        for_transformers(5)
    with pytest.raises(ModelError, match="Bloom"):
        for_transformers(model("bloom"))


@pytest.mark.parametrize("name", ["foo/bar", "demo", Path("/models/foo")])
def test_a_name_is_no_model(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def loading(*_: Any, **__: Any) -> None:
        raise AssertionError("it was loaded")

    monkeypatch.setattr(engines, "load_engine", loading)
    with pytest.raises(ModelError, match=rf"as from load_engine\('{name}'\)"):
        for_transformers(name)


def test_a_model_without_a_head_is_refused() -> None:
    for load in (for_transformers, load_engine):
        for headless in (model("qwen2").model, model("gpt2").transformer):
            with pytest.raises(ModelError, match=f"{type(headless).__name__} has no language-model head"):
                load(headless)
    with pytest.raises(ModelError, match="Qwen2Model has no language-model head"):
        get_engine(TARGET.model)


def test_what_is_no_tokenizer_is_refused_when_it_is_made() -> None:
    for draft in (DRAFT, get_engine(DRAFT)):
        with pytest.raises(SettingsError, match="not str"):
            for_transformers(draft, tokenizer="x")


def test_other_vocabularies_are_refused_and_the_sides_are_named() -> None:
    small = model("qwen2")
    small.resize_token_embeddings(VOCAB - 5)
    named = rf"the target {type(TARGET).__name__} may emit token 92, which the drafter {type(small).__name__} cannot"
    with pytest.raises(VocabularyMismatch, match=named):
        call(for_transformers(small))


# What is kept -------------------------------------------------------------------------------------------------


def test_a_target_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def counting(loaded: Any, **options: Any) -> Any:
        made.append(loaded)
        return load_engine(loaded, **options)

    monkeypatch.setattr(engines, "load_engine", counting)
    target, draft = model("qwen2"), model("llama", 1)
    outputs = [call(for_transformers(draft), target).tolist() for _ in range(3)]
    assert made == [draft, target]
    assert outputs == [call(None, target).tolist()] * 3
    call(for_transformers(draft), target.to(torch.bfloat16))
    assert made == [draft, target, target], "moved since: measured anew"


def test_engine_and_model_go_together_and_copies_go_without() -> None:
    target = model("qwen2")
    call(target=target)
    assert get_engine(target) is get_engine(target)
    twin = copy.deepcopy(target)
    assert vars(twin)["_outrider"].engine is None
    assert get_engine(twin).model is twin
    gone = weakref.ref(target), weakref.ref(get_engine(target))
    del target
    gc.collect()
    assert [reference() for reference in gone] == [None, None], "for_transformers holds on to a target"


class Failing(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        raise ZeroDivisionError


class Ending(StoppingCriteria):
    """Of the old kind, which answers with a plain bool."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        return input_ids.shape[1] == 6


def test_slots_are_given_back_however_it_ends() -> None:
    call()
    assert call(stopping_criteria=[Ending()]).shape == (1, 6)
    with pytest.raises(ZeroDivisionError):
        call(stopping_criteria=[Failing()])
    assert get_engine(TARGET)._cache.in_use == get_engine(DRAFT)._cache.in_use == 0


def test_a_time_limit_ends_it_after_a_token() -> None:
    assert call(max_time=0.0).shape == (1, 5)


def test_calls_in_many_threads_do_not_mix() -> None:
    """One target, one drafter: without turns their caches would be written by two at once."""
    prompts = [torch.tensor([[n, n + 1, n + 2]]) for n in range(2, 32, 6)]
    wanted = [call(None, ids=ids, max_new_tokens=24).tolist() for ids in prompts]
    found: dict[int, Any] = {}

    def work(n: int) -> None:
        found[n] = call(for_transformers(DRAFT), ids=prompts[n], max_new_tokens=24).tolist()

    threads = [Thread(target=work, args=(n,)) for n in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found.get(n) for n in range(len(prompts))] == wanted


def test_turns_may_be_nested_in_a_thread() -> None:
    """A criterion that generates, with the same models."""

    class Asking(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            call(max_new_tokens=2)
            return torch.tensor([False])

    assert call(stopping_criteria=[Asking()]).tolist() == call(None).tolist()


def test_alone_with_the_same_engine_twice() -> None:
    with exclusive(get_engine(DRAFT), get_engine(DRAFT)):
        pass


# What comes back ----------------------------------------------------------------------------------------------


def test_the_result_comes_with_return_dict_in_generate() -> None:
    out = call(return_dict_in_generate=True)
    assert out.sequences.tolist() == call(None).tolist()
    assert out.outrider.token_ids == out.sequences[0, 4:].tolist()
    assert out.outrider.guarantee == "exact"
    assert list(out) == ["sequences"]
    stopped = call(return_dict_in_generate=True, stopping_criteria=[Ending()])
    assert stopped.outrider is None


def test_a_gate_that_skips_leaves_the_drafter_s_tokens_and_says_so() -> None:
    lossy = for_transformers(DRAFT, gate="never", on_loop="ignore")
    out = call(lossy, return_dict_in_generate=True)
    assert out.sequences.tolist() == call(None, DRAFT).tolist()
    assert out.outrider.guarantee == "edge-only"


class Noting(BaseStreamer):
    def __init__(self) -> None:
        self.told: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.told += value.flatten().tolist()

    def end(self) -> None:
        self.told.append(-1)


@pytest.mark.parametrize("scope", ["block", "repair"])
def test_nothing_is_streamed_that_a_repair_takes_back(scope: Any) -> None:
    """Without holding tokens back, the streamer would be told what the verifier changed later."""
    disagreed = 0
    for n in range(4):
        streamer = Noting()
        mixed = for_transformers(DRAFT, gate="entropy:3.0", scope=scope, k=2)
        ids = torch.tensor([[2 + n, 33, 44]])
        out = call(mixed, ids=ids, max_new_tokens=24, streamer=streamer, return_dict_in_generate=True)
        assert streamer.told == [*out.sequences[0].tolist(), -1]
        assert out.outrider.token_ids == out.sequences[0, 3:].tolist()
        disagreed += out.outrider.stats.disagreed
    assert disagreed or scope == "repair", "the gate skips nothing that the target would change"


# Its parts ----------------------------------------------------------------------------------------------------


def test_a_view_has_its_own_eos_and_may_be_deaf() -> None:
    class Engine:
        eos_ids = (1,)
        name = "engine"
        opened: Prompt

        def open(self, prompt: Prompt) -> int:
            self.opened = prompt
            return 3

    engine = Engine()
    prompt = Prompt((1, 2), features=torch.zeros(2, 3).numpy())
    view = EngineView(engine, (7,), reads_audio=False)
    assert (view.eos_ids, view.name, view.open(prompt)) == ((7,), "engine", 3)
    assert engine.opened == Prompt((1, 2))
    EngineView(engine, (7,)).open(prompt)
    assert engine.opened is prompt


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 5}])
def test_custom_generate_and_the_loop_s_own_generate_agree(options: dict[str, Any]) -> None:
    seeded = for_transformers(DRAFT, k=3, seed=7)
    own = call(seeded, **options)
    assert own.tolist() == TARGET.generate(IDS, custom_generate=seeded, max_new_tokens=8, **options).tolist()
    assert own.tolist() == seeded.generate(TARGET, IDS, max_new_tokens=8, **options).tolist()


def test_of_two_calls_of_generate_the_inner_one_counts() -> None:
    """The outer one's streamer is not told what a criterion generates."""

    class Asking(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            call(max_new_tokens=2)
            return torch.tensor([False])

    streamer = Noting()
    out = call(streamer=streamer, stopping_criteria=[Asking()])
    assert streamer.told == [*out[0].tolist(), -1]


def test_a_streamer_that_is_handed_over_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a later transformers may do."""
    mine, other = Noting(), Noting()

    def handing(*args: Any, **options: Any) -> Any:
        return SPECULATE(*args, streamer=mine, **options)

    out = call(handing, streamer=other)
    assert mine.told == [*out[0, 4:].tolist(), -1]
    assert other.told == out[0, :4].tolist()


needs_llama = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llama_cpp", "gguf", "accelerate")),
    reason="llama-cpp-python, gguf or accelerate is not installed",
)


@needs_llama
@pytest.mark.parametrize("named", [True, False])
def test_a_gguf_file_drafts(tmp_path: Path, named: bool) -> None:
    """Its own tokenizer, if it has one, says what the target's ids mean."""
    from tests.support import tiny_gguf

    draft = load_engine(tiny_gguf.write_qwen2(tmp_path / "draft.gguf", named=named))
    out = call(for_transformers(draft), return_dict_in_generate=True, max_new_tokens=24)
    assert out.sequences.tolist() == call(None, max_new_tokens=24).tolist()
    assert out.outrider.stats.acceptance_rate > 0.8


@pytest.mark.parametrize("model", [5, None, "demo:cloud"])
def test_a_target_that_is_no_model_is_named(model: Any) -> None:
    with pytest.raises(ModelError, match=f"^model: expected a loaded transformers model, not {type(model).__name__}"):
        for_transformers(load_engine("demo:edge")).generate(model)
