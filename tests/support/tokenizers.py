"""Small tokenizers of the kinds that write text with bytes, and of those that do not."""

from __future__ import annotations

import json
from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<s>", "</s>", "<unk>")
WORDS = ("the", " ", "e", "é", "社", "区", "ok", "\ufffd", "삼", "а", "ا", "क", "👍")


@lru_cache
def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's, Llama 3's and Qwen's: a token is any bytes; some here hold letters and half a character."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: n for n, token in enumerate([*SPECIALS, *letters])}, []))
    mixed = ["eÃ", "©x", "Ã©", "ç¤", "¾å", "Ġç¤", "ï¿½", "ï¿½ç"]  # "e" + half of "é", its end + "x", …
    vocabulary = {token: n for n, token in enumerate([*SPECIALS, *letters, *mixed])}
    core = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    core.decoder = decoders.ByteLevel()
    return _fast(core)


@lru_cache
def byte_fallback(kind: str = "llama") -> PreTrainedTokenizerFast:
    """As Llama 2's, Mistral's and Phi-3's ("llama"), Gemma's ("gemma"), or a Unigram model's ("unigram")."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*SPECIALS, *names, *(word.replace(" ", "▁") for word in WORDS), "▁the", "▁▁"]
    vocabulary = {token: n for n, token in enumerate(dict.fromkeys(tokens))}
    if kind == "unigram":
        core = Tokenizer(models.Unigram([(token, -float(n)) for token, n in vocabulary.items()], 2, byte_fallback=True))
    else:
        core = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence(steps if kind == "gemma" else [*steps, decoders.Strip(" ", 1, 0)])
    return _fast(core)


@lru_cache
def word_level(kind: str = "plain") -> PreTrainedTokenizerFast:
    """Tokens that are text: joined by spaces ("plain"), as SentencePiece's ("metaspace"), as BERT's ("wordpiece")."""
    marks = {"plain": "", "metaspace": "▁", "wordpiece": "##"}
    tokens = [*SPECIALS, *WORDS, *(marks[kind] + word for word in WORDS), ".", "n't"]
    core = Tokenizer(models.WordLevel({token: n for n, token in enumerate(dict.fromkeys(tokens))}, "<unk>"))
    if kind != "plain":
        core.decoder = decoders.Metaspace() if kind == "metaspace" else decoders.WordPiece()
    return _fast(core)


@lru_cache
def with_added_tokens(*texts: str, special: bool = False) -> PreTrainedTokenizerFast:
    """The byte-level tokenizer with added tokens, such as Qwen's <tool_call>."""
    made = _fast(Tokenizer.from_str(byte_level().backend_tokenizer.to_str()))
    made.add_tokens([AddedToken(text, special=special, normalized=False) for text in texts])
    return made


def ids_of(text: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The text in single bytes, with whatever a tokenizer of bytes calls them."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw = text.encode()
    if "<0x00>" in tokenizer.get_vocab():
        return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in raw]
    spelt = "".join(part for part, _ in letters.pre_tokenize_str(text))
    return [tokenizer.convert_tokens_to_ids(letter) for letter in spelt]


def _fast(core: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


BYTES = {
    "byte level": byte_level,
    "llama": byte_fallback,
    "gemma": lambda: byte_fallback("gemma"),
    "unigram": lambda: byte_fallback("unigram"),
}
ALL = BYTES | {kind: lambda kind=kind: word_level(kind) for kind in ("plain", "metaspace", "wordpiece")}


CORPUS = (
    "the quick brown fox jumps over the lazy dog, and the dog barks: don't, can't, won't.",
    "def f(x):\n\treturn x + 1  # the end\n\n\nclass Fox:\n    pass\n",
    "社区的人们喜欢狐狸。이 여우는 빠르다. الثعلب السريع يقفز فوق الكلب. Ёжик и лиса. é ü ñ ﬁ Å",
    "👍 👨‍👩‍👧‍👦 🏳️‍🌈 क्षि ไทย \u200d\u00a0 1234567890",
)


@lru_cache
def trained(kind: str) -> PreTrainedTokenizerFast:
    """A small tokenizer that also encodes: "byte level", "llama" (byte fallback), "unigram" or "wordpiece" (lower)."""
    specials = ["<s>", "</s>", "<unk>"]
    end = ["<|end|>"] if kind in ("byte level", "llama") else ["[END]"]
    if kind == "byte level":
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        letters = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=[*end, *specials], initial_alphabet=letters)
    elif kind == "llama":
        core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        core.decoder = decoders.Sequence(steps)
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=[*specials, *names, *end], limit_alphabet=40)
    elif kind == "unigram":
        core = Tokenizer(models.Unigram())
        core.normalizer = normalizers.NFKC()
        core.pre_tokenizer = pre_tokenizers.Metaspace()
        core.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=[*specials, *end], unk_token="<unk>")
    else:
        core = Tokenizer(models.WordPiece(unk_token="<unk>"))
        core.normalizer = normalizers.BertNormalizer(lowercase=True)
        core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        core.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=[*specials, *end])
    core.train_from_iterator(CORPUS, trainer)
    if kind == "llama":  # the byte tokens are ordinary tokens, not special ones
        core = _without_special_bytes(core)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end[0], unk_token="<unk>")


def _without_special_bytes(core: Tokenizer) -> Tokenizer:
    state = json.loads(core.to_str())
    state["added_tokens"] = [each for each in state["added_tokens"] if not each["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(state))
