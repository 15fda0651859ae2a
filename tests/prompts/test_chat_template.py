"""Conversations through chat templates: as in transformers, nothing lost, no control token, and no harm done."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.errors import ContextError, PromptError
from outrider.prompts.chat import encode
from tests.support import chat_templates
from tests.support.tokenizers import byte_fallback

CONTROL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")


class Model:
    """What `encode` knows of an engine."""

    name, max_length, audio = "some/model", None, None

    def __init__(self, tokenizer: Any, template: Any) -> None:
        self.tokenizer = tokenizer
        tokenizer.chat_template = template
        self.vocab_size = len(tokenizer)


def model(template: Any, kind: str = "bytes") -> Model:
    if kind == "bytes":
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        core = Tokenizer(models.BPE({token: n for n, token in enumerate(letters)}, []))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    else:
        core = Tokenizer.from_str(byte_fallback().backend_tokenizer.to_str())
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens(["<think>", "</think>", "<|tool|>"])
    return Model(tokenizer, template)


def chat(*texts: str, system: bool = False) -> list[dict[str, Any]]:
    """Turns of user and assistant, after the system's if there is one."""
    roles = [*["system"] * system, *["user", "assistant"] * len(texts)]
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def theirs(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    continued = messages[-1]["role"] == "assistant"
    options = {"add_generation_prompt": not continued, "continue_final_message": continued}
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options))


# Equal to transformers ------------------------------------------------------------------------------------------

ordinary = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\n 社é👍<|>%{}'\"\\"), max_size=30)
harmless = ordinary.filter(lambda text: not any(token in text for token in (*CONTROL, "<unk>", "<|tool|>")))
TAKEN = {name: source for name, source in chat_templates.WHOLE.items() if name != "thinking"} | {
    "folded": chat_templates.FOLDED
}


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
@pytest.mark.parametrize("template", TAKEN)
@settings(max_examples=40, deadline=None)
@given(texts=st.lists(harmless, min_size=1, max_size=4), system=st.booleans())
def test_ids_are_those_of_transformers(template: str, kind: str, texts: list[str], system: bool) -> None:
    made = model(TAKEN[template], kind)
    messages = chat(*texts, system=system and len(texts) > 1)
    continued = messages[-1]["role"] == "assistant"
    try:
        expected = theirs(made.tokenizer, messages)
    except ValueError:  # nothing to continue
        assert continued
        return
    assert list(encode(made, messages).ids) == expected


@pytest.mark.parametrize("template", chat_templates.WHOLE)
def test_a_last_message_of_the_assistant_is_continued(template: str) -> None:
    made = model(chat_templates.WHOLE[template])
    messages = chat("Name three birds.", "The first is a")
    ids = list(encode(made, messages).ids)
    assert made.tokenizer.decode(ids).endswith("The first is a")
    assert ids == theirs(made.tokenizer, messages)


@pytest.mark.parametrize("order", ["messages | reverse", "messages[:1]"])
def test_a_template_that_cannot_continue_is_refused(order: str) -> None:
    source = chat_templates.CHATML.replace("in messages", f"in {order}")
    with pytest.raises(PromptError, match=r"cannot continue|drops"):
        encode(model(source), chat("Name three birds.", "The first is a"))


def test_an_assistant_without_text_has_nothing_to_continue() -> None:
    messages = [*chat("Hi"), {"role": "assistant", "content": [], "tool_calls": []}]
    with pytest.raises(PromptError, match=r"messages\.1.*no text to continue"):
        encode(model(chat_templates.CHATML), messages)


# Nothing is lost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["text", "parts"])
@pytest.mark.parametrize("template", [chat_templates.PARTS_ONLY, chat_templates.CHATML])
def test_content_goes_in_the_form_that_the_template_takes(template: str, form: str) -> None:
    made = model(template)
    messages = chat("Is this safe?", "It is.", "Why?", system=False)
    if form == "parts":
        messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    text = made.tokenizer.decode(list(encode(made, messages).ids))
    assert "Is this safe?<|im_end|>" in text
    assert "It is.<|im_end|>" in text
    assert "'type'" not in text


def test_parts_become_lines_where_a_template_takes_text() -> None:
    made = model(chat_templates.CHATML)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "user\none\ntwo<|im_end|>" in made.tokenizer.decode(
        list(encode(made, [{"role": "user", "content": parts}]).ids)
    )


@pytest.mark.parametrize(
    ("template", "messages", "named"),
    [
        (chat_templates.NOTHING, chat("Hello"), r"the message.*role user"),
        (chat_templates.NO_SYSTEM, chat("Be kind.", "Hello", system=True), r"messages\.0.*role system.*user's message"),
        (chat_templates.LAST_ONLY, chat("One", "two", "three"), r"messages\.0.*role user"),
        (chat_templates.UPPER, chat("Hello"), "role user"),
        (chat_templates.SHORTENED, chat("A text of more than forty characters is cut by it."), "changes the text"),
        (chat_templates.ESCAPED, chat("1 < 2"), "changes the text"),
        (chat_templates.JSON, chat("two\nlines"), "changes the text"),
    ],
)
def test_a_text_that_a_template_drops_or_changes_is_refused_by_name(template: str, messages: Any, named: str) -> None:
    with pytest.raises(PromptError, match=rf"(?s){named}") as refusal:
        encode(model(template), messages)
    assert "some/model" in str(refusal.value)


def test_a_system_message_is_refused_when_it_is_used_and_not_before() -> None:
    made = model(chat_templates.NO_SYSTEM)
    assert encode(made, chat("Hello")).ids
    with pytest.raises(PromptError, match="drops"):
        encode(made, chat("Be kind.", "Hello", system=True))
    assert encode(made, chat("Hello", "Hi", "Bye")).ids


def test_what_an_assistant_thought_may_be_left_out() -> None:
    made = model(chat_templates.THINKING)
    messages = chat("Hello", "<think>\nA greeting.\n</think>\n\nHi!", "Bye")
    assert list(encode(made, messages).ids) == theirs(made.tokenizer, messages)


# What is no conversation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": 5, "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": {"text": "x"}}],
        [{"role": "user", "content": [{"type": "image", "image": "x"}]}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": "x"}, "y"],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": "x", "more": {1: object()}}, {"role": "user", "content": [{"type": "text"}]}],
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(PromptError):
        encode(model(chat_templates.CHATML.replace("m.content", "m.content | string")), messages)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "x"}, "it has no role"),
        ({"role": None, "content": "x"}, "it has no role"),
        ({"role": 5, "content": "x"}, "the role 5 is not a text"),
        ({"role": True, "content": "x"}, "the role True is not a text"),
        ({"role": ["user"], "content": "x"}, r"the role \['user'\] is not a text"),
    ],
)
def test_a_role_that_is_not_a_text_is_named(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(PromptError, match=f"messages.1: {reason}"):
        encode(model(chat_templates.CHATML), [*chat("Hello"), message])


@pytest.mark.parametrize("role", ["x", "User", "users", "", "m", "ipython", "role"])
@pytest.mark.parametrize("at", [0, 1])
def test_an_unknown_role_is_refused_with_the_known_ones(role: str, at: int) -> None:
    messages = chat("Be kind.", "Hello", system=True)
    messages[at]["role"] = role
    for made in (messages, messages[at : at + 1]):
        with pytest.raises(PromptError) as refused:
            encode(model(chat_templates.CHATML), made)
        assert refused.value.place == f"messages.{messages.index(messages[at]) if len(made) > 1 else 0}.role"
        label = refused.value.place.removesuffix(".role") if len(made) > 1 else "the message"
        known = "expected one of system, developer, user, assistant, tool"
        assert str(refused.value) == f"{label}: the role {role!r}: {known}"


OWN_ROLES = (
    "{% if m['role'] == 'ipython' %}[out]{% endif %}",
    '{% if m.role == "user" or m.role == "ipython" %}[out]{% endif %}',
    "{% if m.role in ['tool', 'ipython'] %}[out]{% endif %}",
    "{% if m['role'] not in ('tool','ipython') %}[out]{% endif %}",
    "{% set role = m.role %}{% if role!='ipython' %}[out]{% endif %}",
)


@pytest.mark.parametrize("test", OWN_ROLES)
def test_a_template_may_have_roles_of_its_own(test: str) -> None:
    made = model(chat_templates.CHATML.replace("{{- '<|im_start|>'", test + "{{- '<|im_start|>'", 1))
    assert encode(made, [*chat("Hello", "Hi"), {"role": "ipython", "content": "5"}]).ids
    with pytest.raises(PromptError, match=r"the role 'x': expected one of system, .*, tool, ipython$"):
        encode(made, [{"role": "x", "content": "5"}])


# Templates that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [*chat_templates.FAULTY, *chat_templates.BOMBS])
def test_whatever_a_template_raises_is_a_prompt_error_that_names_the_model(template: str) -> None:
    with pytest.raises(PromptError, match="the chat template of some/model"):
        encode(model("{{ messages[0].content }}" + template), chat("Hello"))


def test_control_characters_in_what_a_template_raises_are_escaped() -> None:
    template = "{{ messages[0].content }}{{ raise_exception('no \x1b[2J way') }}"
    with pytest.raises(PromptError) as caught:
        encode(model(template), chat("Hello"))
    assert str(caught.value).endswith(r"failed: no \x1b[2J way")


fragments = st.sampled_from([*chat_templates.FAULTY, *chat_templates.BOMBS, *chat_templates.WHOLE.values()]).flatmap(
    lambda source: st.integers(0, len(source)).map(lambda at: source[:at])
)


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(fragments | st.text("{}%|~*+-.'a1[]() \n", max_size=12), max_size=4))
def test_any_template_ends_in_a_prompt_or_in_a_prompt_error(parts: list[str]) -> None:
    try:
        ids = encode(model("{{ messages[0].content }}" + "".join(parts)), chat("Hello")).ids
    except PromptError:
        return
    assert ids


def test_a_bomb_that_a_text_sets_off() -> None:
    bomb = "{% for m in messages %}{{ m.content }}{{ 'a' * (m.content | length) ** 9 }}{% endfor %}"
    with pytest.raises(PromptError, match="more than"):
        encode(model(bomb), chat("Hello " * 100))


def test_named_templates_need_a_default() -> None:
    messages = chat("Hello")
    named = {"default": chat_templates.CHATML, "rag": "{{ 1 / 0 }}"}
    assert encode(model(named), messages).ids == encode(model(chat_templates.CHATML), messages).ids
    with pytest.raises(PromptError, match=r"some/model \(rag, tool_use\) have no default"):
        encode(model({"rag": "x", "tool_use": "y"}), messages)


def test_a_text_that_cannot_fit_is_refused_before_it_is_rendered() -> None:
    made = model("{{ 1 / 0 }}")
    made.max_length = 100  # type: ignore[assignment]
    with pytest.raises(ContextError):
        encode(made, chat("x" * 10_000_000))


# Control tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [*CONTROL, "<|tool|>", "<think>"])
@pytest.mark.parametrize("role", ["system", "user"])
def test_a_control_token_in_a_text_is_refused_by_name(token: str, role: str) -> None:
    template = chat_templates.CHATML + "{# #}{% if false %}<think>{% endif %}"
    messages = [{"role": role, "content": f"a{token}b"}, *chat("Hello")]
    with pytest.raises(PromptError) as refusal:
        encode(model(template), messages)
    assert f"messages.0.content contains the control token {token!r}" in str(refusal.value)
    with pytest.raises(PromptError, match="the message contains the control token"):
        encode(model(template), chat(token))


def test_a_control_token_in_parts_in_a_role_or_in_another_field() -> None:
    made = model(chat_templates.PARTS_ONLY)
    split = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    for message in (
        {"role": "user", "content": split},
        {"role": "user<|im_end|>", "content": "x"},
        {"role": "user", "content": "x", "name": "</s>"},
        {"role": "user", "content": [{"type": "text", "text": "a", "more": ["<s>"]}]},
    ):
        with pytest.raises(PromptError, match="control token"):
            encode(made, [message])


def test_what_an_assistant_wrote_may_hold_its_own_tokens_but_no_turns() -> None:
    made = model(chat_templates.CHATML + "{% if false %}<think>{% endif %}")
    assert encode(made, chat("Hello", "<think>Hm.</think>Hi!", "Bye")).ids
    with pytest.raises(PromptError, match=r"messages\.1\.content contains the control token '<\|im_end\|>'"):
        encode(made, chat("Hello", "Hi!<|im_end|>", "Bye"))


def test_a_control_token_that_is_found_in_normalised_text() -> None:
    core = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1}, "<unk>"))
    core.normalizer, core.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    tokenizer.add_tokens([AddedToken("<end>", special=True, normalized=True)], special_tokens=False)
    made = Model(tokenizer, chat_templates.CHATML)
    assert encode(made, chat("hello other")).ids
    if made.tokenizer("<END>", add_special_tokens=False)["input_ids"] == [
        made.tokenizer.convert_tokens_to_ids("<end>")
    ]:
        with pytest.raises(PromptError, match="control token '<end>'"):
            encode(made, chat("hello <END>"))


def test_raw_text_is_raw() -> None:
    """A prompt that is no conversation is what the model reads: control tokens are how its user writes turns."""
    made = model(chat_templates.CHATML)
    ids = encode(made, "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n").ids
    assert ids == encode(made, chat("Hello")).ids
