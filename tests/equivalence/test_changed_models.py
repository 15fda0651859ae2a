"""`for_transformers` with models that change between calls: the output stays that of plain `generate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from outrider import (
    ModelError,
    PromptError,
    SpeculativeDecoder,
    StateError,
    VocabularyMismatch,
    for_transformers,
    load_engine,
    local,
)
from outrider.integrations.transformers.engines import get_engine
from tests.support.tiny_text_models import CONFIGS, model

IDS = torch.tensor([[2, 33, 44, 55]])


def plain(target: Any, ids: torch.Tensor = IDS) -> list[int]:
    training = target.training
    found = target.eval().generate(input_ids=ids, max_new_tokens=12, do_sample=False)[0].tolist()
    target.train(training)
    return found


def ours(custom: Any, target: Any, ids: torch.Tensor = IDS) -> list[int]:
    return target.generate(input_ids=ids, max_new_tokens=12, do_sample=False, custom_generate=custom)[0].tolist()


def grow(made: Any) -> None:
    made.resize_token_embeddings(131, mean_resizing=False)
    made.get_output_embeddings().weight.data[97:].normal_(0, 3)


def train(made: Any) -> None:
    made(input_ids=IDS, labels=IDS).loss.backward()
    torch.optim.SGD(made.parameters(), lr=0.5).step()
    made.zero_grad()


class Adapted(nn.Module):
    """A projection with a low-rank addition, as adapters make it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapt(made: Any) -> None:
    for layer in made.model.layers:
        layer.mlp.up_proj = Adapted(layer.mlp.up_proj)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "more tokens": grow,
    "fewer tokens": lambda made: made.resize_token_embeddings(80),
    "a training step": train,
    "new weights": lambda made: made.load_state_dict(model("qwen2", 5).state_dict()),
    "adapters": adapt,
    "a hook": lambda made: made.model.layers[0].register_forward_hook(lambda *all: all[2] * 1.5),
    "float64": lambda made: made.double(),
    "bfloat16": lambda made: made.bfloat16(),
    "eager attention": lambda made: made.set_attn_implementation("eager"),
    "flexible attention": lambda made: made.config._attn_implementation,
    "training mode": lambda made: made.train(),
    "another theta": lambda made: made.model.rotary_emb.inv_freq.mul_(0.5),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_target_that_was_changed_is_read_anew(name: str) -> None:
    target, custom = model("qwen2"), for_transformers(model("qwen2", 3), k=3)
    assert ours(custom, target) == plain(target)
    CHANGES[name](target)
    if name == "more tokens":
        with pytest.raises(VocabularyMismatch, match="may emit token 97"):
            ours(custom, target)
        custom = for_transformers(target, k=3)
    assert ours(custom, target) == plain(target)


@pytest.mark.parametrize("name", CHANGES)
def test_a_drafter_that_was_changed_is_read_anew(name: str) -> None:
    drafter, target = model("qwen2", 3), model("qwen2")
    custom = for_transformers(drafter, k=3)
    ours(custom, target)
    before = get_engine(drafter)
    CHANGES[name](drafter)
    try:
        assert ours(custom, target) == plain(target)
    except VocabularyMismatch:
        assert name == "fewer tokens"
    if name not in ("training mode", "another theta", "flexible attention"):
        assert get_engine(drafter) is not before


def test_modules_stay_in_the_mode_they_were_in() -> None:
    target, drafter = model("qwen2").train(), model("qwen2", 3)
    target.model.layers[0].eval()
    custom = for_transformers(drafter.train(), k=3)
    modes = [module.training for made in (target, drafter) for module in made.modules()]
    ours(custom, target)
    assert [module.training for made in (target, drafter) for module in made.modules()] == modes


def test_an_unchanged_model_keeps_its_engine() -> None:
    target, custom = model("qwen2"), for_transformers(model("qwen2", 3), k=3)
    ours(custom, target)
    first = get_engine(target)
    ours(custom, target)
    plain(target)
    assert get_engine(target) is first


@pytest.mark.parametrize("name", ["more tokens", "a training step", "float64", "training mode", "adapters", "a hook"])
def test_an_engine_of_a_model_that_was_changed_is_refused(name: str) -> None:
    made = model("qwen2")
    decoder = SpeculativeDecoder(None, local(engine := load_engine(made)), reader=engine)
    decoder.generate([1, 2], max_new_tokens=2)
    CHANGES[name](made)
    with pytest.raises(StateError, match="changed after its engine was made"):
        decoder.generate([1, 2], max_new_tokens=2)


def test_a_prompt_id_that_the_drafter_has_no_row_for_is_refused_by_name() -> None:
    target, drafter = model("qwen2"), model("qwen2", 3)
    grow(target)

    class Named:
        """A tokenizer of 90 tokens: what lies beyond is padding on either side."""

        chat_template = None
        all_special_ids = ()

        def get_vocab(self) -> dict[str, int]:
            return {str(n): n for n in range(90)}

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [str(n) for n in ids]

        def decode(self, ids: list[int], **_: Any) -> str:
            return " ".join(map(str, ids))

    custom = for_transformers(drafter, tokenizer=Named())
    with pytest.raises(PromptError, match="cannot read token 120: it has 97 rows"):
        ours(custom, target, torch.tensor([[2, 120, 4]]))


def spoiled(value: float, part: str) -> Any:
    made = model("qwen2")
    for name, weight in made.named_parameters():
        if part in name:
            weight.data.view(-1)[5] = value
    return made


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["layers.1.mlp.down_proj", "model.norm"])
def test_weights_that_are_no_numbers_are_the_reason_that_is_given(value: float, part: str) -> None:
    with pytest.raises(ModelError, match=f"weights hold NaN or infinity, the first in .*{part}"):
        load_engine(spoiled(value, part))


def test_an_overflow_is_told_from_bad_weights() -> None:
    made = model("qwen2").half()
    for weight in made.parameters():
        weight.data.mul_(100)
    with pytest.raises(ModelError, match="overflow in float16"):
        load_engine(made)


def test_a_float64_model_is_decoded_as_generate_does() -> None:
    target = model("qwen2").double()
    assert ours(for_transformers(model("qwen2", 3), k=3), target) == plain(target)


UNSUITABLE: dict[str, Callable[[], Any]] = {
    "xlm": lambda: tf.XLMWithLMHeadModel(
        tf.XLMConfig(vocab_size=97, emb_dim=32, n_layers=2, n_heads=4, causal=True)
    ),
    "xmod": lambda: tf.XmodForCausalLM(
        tf.XmodConfig(
            vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
            is_decoder=True,
        )
    ),
    "float8": lambda: model("qwen2").to(torch.float8_e4m3fn),
    "meta": lambda: tf.AutoModelForCausalLM.from_config(CONFIGS["qwen2"]()).to("meta"),
    "mamba": lambda: model("mamba"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNSUITABLE)
def test_models_that_cannot_be_driven_are_refused_by_name(kind: str) -> None:
    made = UNSUITABLE[kind]()
    with pytest.raises(ModelError, match=type(made).__name__):
        load_engine(made)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
def test_models_of_any_attention_implementation_are_decoded(attention: str) -> None:
    torch.manual_seed(0)
    target = tf.AutoModelForCausalLM.from_config(CONFIGS["qwen2"](), attn_implementation=attention).eval()
    custom = for_transformers(model("qwen2", 3), k=3)
    expected = tf.AutoModelForCausalLM.from_config(CONFIGS["qwen2"](), attn_implementation="eager").eval()
    expected.load_state_dict(target.state_dict())
    assert ours(custom, target) == plain(expected)
