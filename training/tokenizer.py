"""The pair's tokenizer: byte-level BPE over the captions, one token for a Chinese character, the family's specials."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from outrider.prompts.captions import LANGUAGES, TASKS, instruction, messages
from training.grammar import caption, combinations

VOCAB_SIZE: Final = 1024
ENDOFTEXT, IM_START, IM_END, AUDIO = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|AUDIO|>"
MEDIA: Final = {
    "image_token": "<|IMAGE|>",
    "audio_token": AUDIO,
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
SPECIALS: Final = (ENDOFTEXT, IM_START, IM_END, *MEDIA.values())

CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.content is string -%}"
    "{{- message.content -}}"
    "{%- else -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'audio' -%}{{- '<|audio_bos|><|AUDIO|><|audio_eos|>' -}}"
    "{%- elif part.type == 'text' -%}{{- part.text -}}"
    "{%- else -%}{{- raise_exception('this model reads text and audio, not ' + part.type) -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}\n"
)


def corpus() -> list[str]:
    """What the tokenizer is trained on: every caption, the instructions, the roles."""
    texts = [
        caption(a, task, lang, shift)
        for a in combinations()
        for task in TASKS
        for lang in LANGUAGES
        for shift in (0, 1)
    ]
    return [*texts, *(instruction(task, lang) for task in TASKS for lang in LANGUAGES), "system user assistant\n"]


def build() -> Tokenizer:
    """Train the tokenizer; the result has at most `VOCAB_SIZE` entries, among them all 256 bytes."""
    tokenizer = Tokenizer(models.BPE())
    han = pre_tokenizers.Split(Regex(r"[\u4e00-\u9fff]"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([han, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": ENDOFTEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": MEDIA,
        "processor_class": "Qwen2_5OmniProcessor",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _id(tokenizer: Tokenizer, token: str) -> int:
    number = tokenizer.token_to_id(token)
    if number is None:
        raise ValueError(f"the tokenizer has no {token}")
    return int(number)


class Prompts:
    """Token ids of prompts and captions, without going through a chat template each time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.audio = _id(tokenizer, AUDIO)
        self.end = _id(tokenizer, IM_END)
        self.pad = _id(tokenizer, ENDOFTEXT)
        self._halves = {(task, lang): self._split(task, lang) for task in TASKS for lang in LANGUAGES}

    def _split(self, task: str, lang: str) -> tuple[list[int], list[int]]:
        text = messages(task, lang)[0]["content"][1]["text"]
        before = f"{IM_START}user\n{MEDIA['audio_bos_token']}"
        after = f"{MEDIA['audio_eos_token']}{text}{IM_END}\n{IM_START}assistant\n"
        return self.tokenizer.encode(before).ids, self.tokenizer.encode(after).ids

    def prompt(self, task: str, lang: str, audio_tokens: int) -> list[int]:
        """The prompt of a caption task, the audio placeholder expanded."""
        before, after = self._halves[task, lang]
        return [*before, *[self.audio] * audio_tokens, *after]

    def answer(self, text: str) -> list[int]:
        """A caption as the model must write it, its end token included."""
        return [*self.tokenizer.encode(text).ids, self.end]

    def decode(self, ids: list[int]) -> str:
        """The caption of generated ids, up to the end token."""
        return self.tokenizer.decode(ids[: ids.index(self.end)] if self.end in ids else ids)
