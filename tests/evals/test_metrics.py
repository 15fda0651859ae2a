"""Metrics against values worked out by hand or printed by their authors, and against the libraries' own scores."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU, CHRF  # type: ignore[attr-defined]

from outrider.decoding.result import Stats
from outrider.errors import ModelError, SettingsError
from outrider.evals import word_segmentation as words_module
from outrider.evals.attributes import NAMES, accuracy, parse
from outrider.evals.bertscore import Encoder, bertscore, f1
from outrider.evals.bootstrap import Measure, Resampling, measure
from outrider.evals.cider import cider_d as cider_scores
from outrider.evals.format_metrics import (
    FormatRules,
    check_rules,
    compliance,
    distinct,
    language_match,
    longest_loop,
    repetition,
)
from outrider.evals.latency import Timing, latency, spent
from outrider.evals.manifest import Item, load_set
from outrider.evals.metrics import Scoring, agreement, score
from outrider.evals.overlap import Pair, bleu, chrf, cider_d, rouge_l
from outrider.evals.voice_quality import QUALITIES
from outrider.evals.word_segmentation import import_extra, in_language, words
from training.grammar import caption, combinations, stated
from training.grammar import parse as training_parse
from training.phrases import CONCISE, DEFAULT, DETAILED, EMOTIONS

HOW = Resampling(draws=200)
ZH = "说话人语速缓慢，音调低沉。"
SAID = ["The dog bit the man.", "It was not unexpected.", "The man bit him first."]  # sacrebleu's README
MEANT = [
    ["The dog bit the man.", "It was not unexpected.", "The man bit him first."],
    ["The dog had bit the man.", "No one was surprised.", "The man had bitten the dog."],
]


def some(found: Measure | None) -> Measure:
    assert found is not None
    return found


def pairs(texts: list[str], references: list[tuple[str, ...]], lang: str) -> list[Pair]:
    return [Pair(text, refs, lang) for text, refs in zip(texts, references, strict=True)]


# Words and languages ----------------------------------------------------------------------------------------


def test_words_of_mixed_text() -> None:
    assert words(ZH) == ("说话", "人", "语速", "缓慢", "音调", "低沉")
    assert words("Don't say 你好, Mr_X2 — Ünïcode! Привет") == (
        *("don", "t", "say", "你好", "mr", "x2", "ünïcode", "привет"),
    )
    assert words("。！ …") == ()


def test_words_of_ascii_are_those_of_rouge_score() -> None:
    from rouge_score.tokenizers import DefaultTokenizer

    text = "The quick_brown fox's 3.5 jumps -- over it; isn't THAT so?"
    assert list(words(text)) == DefaultTokenizer(use_stemmer=False).tokenize(text)


@pytest.mark.parametrize(
    ("text", "lang", "expected"),
    [
        (ZH, "zh", True),
        (ZH, "zh-CN", True),
        (ZH, "en", False),
        ("The speaker talks slowly.", "en", True),
        ("The speaker talks slowly.", "zh", False),
        ("他在说 AI 的事情和别的", "zh", True),
        ("これはペンです", "zh", False),
        ("これはペンです", "ja", True),
        ("123 !", "en", False),
        ("anything", "xx", None),
    ],
)
def test_the_script_of_a_text(text: str, lang: str, expected: bool | None) -> None:
    assert in_language(text, lang) is expected


def test_a_missing_package_is_named() -> None:
    with pytest.raises(SettingsError, match=r"no_such_package: pip install .*eval"):
        import_extra("no_such_package")


# Overlap ----------------------------------------------------------------------------------------------------


def test_bleu_and_chrf_are_sacrebleu_s() -> None:
    texts = ["The dog bit the man.", "It wasn't surprising.", "The man had just bitten him."]
    given_pairs = pairs(texts, list(zip(*MEANT, strict=True)), "en")
    assert some(bleu(given_pairs, HOW)).pooled.value == pytest.approx(48.530827, abs=1e-6)  # printed in its README
    assert some(bleu(given_pairs, HOW)).pooled.value == pytest.approx(BLEU().corpus_score(texts, MEANT).score)
    assert some(chrf(given_pairs, HOW)).pooled.value == pytest.approx(CHRF().corpus_score(texts, MEANT).score)


def test_bleu_of_chinese_counts_characters() -> None:
    """我爱你们 against 我爱你: 1-grams 3/4, 2-grams 2/3, 3-grams 1/2, 4-grams 0/1 smoothed to 1/2."""
    found = some(bleu([Pair("我爱你们", ("我爱你",), "zh")], HOW))
    assert found.pooled.value == pytest.approx(100 * (3 / 4 * 2 / 3 * 1 / 2 * 1 / 2) ** 0.25)


def test_chrf_by_hand() -> None:
    """ab against ac: of 1-grams 1/2, of 2-grams 0/1; averaged 1/4 each way, so that F is 1/4."""
    assert some(chrf([Pair("ab", ("ac",), "en")], HOW)).pooled.value == pytest.approx(25.0)


def test_rouge_l_by_hand() -> None:
    """The longest common subsequence is "the quick brown jumps the": 5 of 8 and of 9 words."""
    one = Pair("The quick brown dog jumps on the log.", ("The quick brown fox jumps over the lazy dog", "no"), "en")
    assert some(rouge_l([one], HOW)).pooled.value == pytest.approx(2 * 5 / (8 + 9))


def test_rouge_l_hears_chinese() -> None:
    """语速 缓慢 音调 高亢 against 语速 缓慢 音调 低沉: 3 of 4 words."""
    found = some(rouge_l([Pair("语速缓慢，音调高亢", ("语速缓慢，音调低沉",), "zh")], HOW))
    assert found.pooled.value == pytest.approx(0.75)


def test_cider_d_is_that_of_aac_metrics() -> None:
    """What aac-metrics 0.6.0 computes for the captions of its README."""
    texts = ["a man is speaking", "rain falls"]
    references = [
        ("a man speaks.", "someone speaks.", "a man is speaking while a bird is chirping in the background"),
        ("rain is falling hard on a surface",),
    ]
    split = cider_scores([text.split() for text in texts], [[ref.split() for ref in refs] for refs in references])
    assert split == pytest.approx([1.3640549170323026, 0.5586545156664786])


def test_cider_d_by_hand() -> None:
    """Equal texts of four words of their own: each of the four cosines is 1. A word that all share weighs 0."""
    same = [["a", "b", "c", "d"], ["e", "f", "g", "h"]]
    assert cider_scores(same, [[words_] for words_ in same]) == pytest.approx([10.0, 10.0])
    assert cider_scores([["a"], ["a"]], [[["a"]], [["a"]]]) == [0.0, 0.0]
    longer = cider_scores([["x"] * 7, ["q"]], [[["x"]], [["y"]]])[0]  # six bigrams more
    assert longer == pytest.approx(10 / 4 * math.exp(-(6**2) / 72) / 7)


def test_cider_d_needs_two_items_of_a_language() -> None:
    three = [Pair("a b", ("a b",), "en"), Pair("c d", ("c d",), "en"), Pair("你好", ("你好",), "zh")]
    found = some(cider_d(three, HOW))
    assert set(found.by_lang) == {"en"}
    assert found.pooled.n == 2
    assert cider_d(three[1:], HOW) is None


def test_items_without_references_are_left_out() -> None:
    for metric in (bleu, chrf, rouge_l, cider_d):
        assert metric([Pair("a", (), "en")], HOW) is None
    assert some(bleu([Pair("a", (), "en"), Pair("b", ("b",), "en")], HOW)).pooled.n == 1


# BERTScore --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    from transformers import BertConfig, BertModel, BertTokenizer

    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdef"]))
    BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=11, max_position_embeddings=16, **sizes)).save_pretrained(folder)
    return Encoder(folder)


def test_bertscore_of_vectors_by_hand() -> None:
    """Ours: x and y; theirs: x. Precision (1 + 0)/2, recall 1; the special first token is matched with, not counted."""
    x, y, special = [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]
    ours = torch.tensor([special, x, y]), torch.tensor([False, True, True])
    theirs = torch.tensor([special, x]), torch.tensor([False, True])
    assert f1(ours, theirs) == pytest.approx(2 * 0.5 * 1 / 1.5)
    assert f1(ours, (theirs[0][:1], theirs[1][:1])) == 0


def test_bertscore_of_a_local_encoder(encoder: Encoder) -> None:
    found = some(bertscore([Pair("a b c", ("f e", "a b c"), "en"), Pair("a b", ("c d e",), "en")], encoder, HOW))
    assert found.pooled.value < 1
    assert some(bertscore([Pair("a b c", ("f e", "a b c"), "en")], encoder, HOW)).pooled.value == pytest.approx(1)
    assert some(bertscore([Pair("a " * 50, ("b",), "en")], encoder, HOW)).pooled.n == 1  # longer than the encoder


def test_a_folder_without_an_encoder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no encoder"):
        Encoder(tmp_path)


# Form -------------------------------------------------------------------------------------------------------


def test_distinct_and_loops_by_hand() -> None:
    assert distinct(["a", "b", "a", "b"], 1) == 2 / 4
    assert distinct(["a", "b", "a", "b"], 2) == 2 / 3
    assert distinct(["a"], 2) is None
    assert longest_loop(["a", "b", "c", "b", "c", "b"]) == 5
    assert longest_loop(["a", "b", "c", "d"]) == 0
    assert longest_loop(["x", "y", "y", "y", "z", "z"]) == 3
    found = repetition(["慢慢慢慢", "a b"], ["zh", "en"], HOW)
    assert some(found["longest_loop"]).by_lang["en"].value == 0
    assert some(found["distinct_2"]).pooled.n <= 2


@given(st.lists(st.sampled_from("abc"), max_size=12))
def test_longest_loop_is_the_one_that_all_stretches_give(tokens: list[str]) -> None:
    stretches = [tokens[i:j] for i in range(len(tokens)) for j in range(i + 2, len(tokens) + 1)]
    looped = [s for s in stretches if any(s[p:] == s[:-p] for p in range(1, len(s) // 2 + 1))]
    assert longest_loop(tokens) == max(map(len, looped), default=0)


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        (ZH, set()),
        ("She said “yes.”", set()),
        ("", {"present", "ended", "length"}),
        (" \n", {"present", "ended", "length"}),
        ("The voice is loud", {"ended"}),
        ("The voice is loud.<|im_end|>", {"clean", "ended"}),
        ("assistant: it is loud.", {"clean"}),
        ("助手说：assistant 很忙。", set()),
        ("<think>Hm.</think> Loud.", {"clean"}),
        ("It is l\ufffdud.", {"clean"}),
        ("Loud.", {"length"}),
        ("a " * 500 + ".", {"length"}),
    ],
)
def test_format_rules_find_violations(text: str, broken: set[str]) -> None:
    assert {name for name, kept in check_rules(text, FormatRules()).items() if not kept} == broken


def test_compliance_and_language_are_shares() -> None:
    found = compliance(["Loud and clear.", "Loud and clear"], ["en", "en"], HOW, FormatRules())
    assert some(found["format_ended"]).pooled.value == 0.5
    assert some(found["format_all"]).pooled.value == 0.5
    matched = some(language_match([ZH, ZH, "x"], ["zh", "en", "xx"], HOW))
    assert (matched.pooled.value, matched.pooled.n) == (0.5, 2)


# Attributes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lang", ["zh", "en"])
def test_the_parser_is_that_of_training(lang: str) -> None:
    for task in ("default", "detailed", "concise"):
        for n, attributes in enumerate(combinations()):
            text = caption(attributes, task, lang, shift=n)
            assert parse(text, lang) == training_parse(text, lang) == stated(attributes, task)


@pytest.mark.parametrize("lang", ["zh", "en"])
def test_the_phrases_are_those_of_training(lang: str) -> None:
    from outrider.evals.attributes import _PHRASES

    ours = {
        name: {(phrase, value) for value, phrases in values.items() for phrase in phrases}
        for name, values in _PHRASES[lang].items()
    }
    tables = (DEFAULT[lang], DETAILED[lang], CONCISE[lang])
    theirs = {
        name: {(word, value) for table in tables for value, words_ in table[name].items() for word in words_}
        for name in DEFAULT[lang]
    }
    assert ours == {**theirs, "emotion": {(word, mood) for mood, word in EMOTIONS[lang].items()}}


@pytest.mark.parametrize(
    ("lang", "text", "stated_"),
    [
        ("zh", "音色明亮，语速适中", {"timbre": "bright"}),
        ("zh", "说话人的音色比较低沉。", {"timbre": "dark"}),
        ("zh", "声音有些沙哑，心情悲伤", {"timbre": "hoarse", "emotion": "sad"}),
        ("zh", "清脆的嗓音", {"timbre": "crisp"}),
        ("zh", "音色非常浑厚", {"timbre": "full"}),
        ("zh", "音色柔和，声音放松", {"timbre": "soft", "tension": "relaxed"}),
        ("zh", "嗓音低沉浑厚", {"pitch": "low", "timbre": "full"}),
        ("zh", "嗓音低沉", {"pitch": "low"}),
        ("zh", "音调低沉，音色清脆", {"pitch": "low", "timbre": "crisp"}),
        ("zh", "音调比较低，嗓音听起来浑厚。", {"pitch": "low"}),
        ("zh", "音调比较低，嗓音听起来浑厚。" * 3, {"pitch": "low"}),
        ("zh", "音色：沙哑；紧张度：高", {"timbre": "hoarse", "tension": "tense"}),
        ("zh", "沙哑而低沉的嗓音", {"timbre": "hoarse"}),
        ("zh", "紧张度与音量都没有提到，音调高", {}),
        ("en", "Timbre: bright; tension: high", {"timbre": "bright", "tension": "tense"}),
        ("en", "a high pitch and low tension", {"tension": "relaxed"}),
        ("zh", "音色偏亮", {"timbre": "bright"}),
        ("zh", "紧张程度偏低", {"tension": "relaxed"}),
        ("zh", "声音轻柔", {"loudness": "soft"}),
        ("zh", "音色并不沙哑", {}),
        ("zh", "音色不仅清脆", {"timbre": "crisp"}),
        ("zh", "心情明亮，房间柔和", {}),
        ("zh", "音色音色中，音色中，紧张度，紧张度，情绪", {}),
        ("zh", "声音紧绷", {"tension": "tense"}),
        ("zh", "紧张度较高", {"tension": "tense"}),
        ("zh", "紧张度很低，情绪平静", {"tension": "relaxed", "emotion": "calm"}),
        ("zh", "紧张度适中", {"tension": "medium"}),
        ("zh", "紧张度不高", {}),
        ("zh", "声音没有紧绷", {}),
        ("zh", "情绪紧张", {"emotion": "nervous"}),
        ("zh", "紧张度高，情绪紧张", {"tension": "tense", "emotion": "nervous"}),
        ("en", "The timbre is bright.", {"timbre": "bright"}),
        ("en", "She has a dark, resonant timbre", {"timbre": "dark"}),
        ("en", "A hoarse voice", {"timbre": "hoarse"}),
        ("en", "in a crisp and clear voice", {"timbre": "crisp"}),
        ("en", "a full timbre", {"timbre": "full"}),
        ("en", "a voice full of melody", {}),
        ("en", "soft in timbre, and the voice is relaxed", {"timbre": "soft", "tension": "relaxed"}),
        ("en", "at a soft volume", {"loudness": "soft"}),
        ("en", "in a soft voice", {}),
        ("en", "The pitch is low, and the voice sounds dark.", {"pitch": "low"}),
        ("en", "with a deep voice, hoarse in timbre", {"pitch": "low", "timbre": "hoarse"}),
        ("en", "The voice is not hoarse", {}),
        ("en", "not a very hoarse voice", {}),
        ("en", "The voice is not loud but hoarse", {"timbre": "hoarse"}),
        ("en", "The room is bright, the voice is quiet", {}),
        ("en", "The voice sounds tense", {"tension": "tense"}),
        ("en", "with high tension", {"tension": "tense"}),
        ("en", "The tension is moderate", {"tension": "medium"}),
        ("en", "with little vocal tension", {"tension": "relaxed"}),
        ("en", "a tense situation, nervousness", {"emotion": "nervous"}),
        ("en", "The voice isn't tense", {}),
        ("en", "neither tense nor relaxed in tone", {}),
        ("fr", "timbre bright", {}),
    ],
)
def test_timbre_and_tension_are_read_from_captions(lang: str, text: str, stated_: dict[str, str]) -> None:
    assert parse(text, lang) == stated_


def test_the_bundled_captions_state_neither_timbre_nor_tension() -> None:
    items = load_set("demo")
    for item in items:
        for reference in item.references:
            assert parse(reference, item.lang) == item.labels
    found = accuracy(items, [item.references[0] for item in items], HOW)
    assert some(found["attribute_all"]).pooled.value == 1
    assert found["attribute_timbre"] is found["attribute_tension"] is None


def test_timbre_and_tension_are_scored_where_items_are_labelled_with_them() -> None:
    labels = {"timbre": "hoarse", "tension": "tense"}
    items = [Item("a", prompt="p", lang="zh", labels=labels), Item("b", prompt="p", labels=labels)]
    found = score(items, ["音色沙哑，紧张度高。", "A bright, tense voice."], how=Scoring(resampling=HOW))
    assert found["attribute_timbre"].pooled.value == 0.5
    assert found["attribute_tension"].pooled.value == 1
    assert found["attribute_all"].pooled.value == 0.5
    assert "attribute_emotion" not in found


def test_accuracy_of_attributes() -> None:
    items = [
        Item("a", prompt="p", labels={"rate": "slow", "pitch": "low", "category": "x"}),
        Item("b", prompt="p", labels={"rate": "fast"}),
        Item("c", prompt="p"),
    ]
    texts = ["The speaker talks slowly, in a high pitch", "This is rapid speech, in a high pitch", "in a low pitch"]
    found = accuracy(items, texts, HOW)
    assert (some(found["attribute_rate"]).pooled.value, some(found["attribute_rate"]).pooled.n) == (1, 2)
    assert (some(found["attribute_pitch"]).pooled.value, some(found["attribute_pitch"]).pooled.n) == (0, 1)
    assert (some(found["attribute_all"]).pooled.value, some(found["attribute_all"]).pooled.n) == (0, 2)
    assert found["attribute_emotion"] is None
    assert parse("Привет", "ru") == {}
    own = accuracy(items, ["x"] * 3, HOW, parse=lambda text, lang: {"category": text}, names=("category",))
    assert some(own["attribute_all"]).pooled.value == 1


# Intervals and pooling --------------------------------------------------------------------------------------


def test_pooling_weighs_languages_by_their_items() -> None:
    found = some(measure([1.0, 1.0, 1.0, 0.0], ["en", "en-GB", "EN", "zh"], HOW))
    assert found.by_lang["en"].value == 1
    assert found.by_lang["zh"].value == 0
    assert (found.pooled.value, found.pooled.n) == (0.75, 4)
    assert (found.by_lang["zh"].low, found.by_lang["zh"].high) == (None, None)
    assert (found.pooled.low, found.pooled.high) == (0.75, 0.75)  # each language alone does not vary
    assert found.to_json()["by_lang"]["en"]["n"] == 3
    assert measure([], [], HOW) is None


def test_an_interval_is_near_the_normal_one_and_repeatable() -> None:
    rows = [0.0, 1.0] * 100
    one, again, other = (
        some(measure(rows, ["en"] * 200, Resampling(seed=seed, draws=2000))).pooled for seed in (1, 1, 2)
    )
    assert one == again
    assert one != other
    assert one.low == pytest.approx(0.5 - 1.96 * 0.5 / math.sqrt(200), abs=0.01)
    assert one.high == pytest.approx(0.5 + 1.96 * 0.5 / math.sqrt(200), abs=0.01)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0, 1), st.sampled_from(["zh", "en"])), min_size=1, max_size=20))
def test_the_pooled_mean_is_the_mean_and_lies_in_range(rows: list[tuple[float, str]]) -> None:
    values, langs = [value for value, _ in rows], [lang for _, lang in rows]
    pooled = some(measure(values, langs, Resampling(draws=20))).pooled
    assert pooled.value == pytest.approx(sum(values) / len(values))
    if pooled.low is not None and pooled.high is not None:
        assert min(values) - 1e-9 <= pooled.low <= pooled.high <= max(values) + 1e-9


# Latency ----------------------------------------------------------------------------------------------------


def timing(
    total: float, ttft: float = 0.1, arrivals: tuple[float, ...] = (), tokens: int = 3, **parts: float
) -> Timing:
    return Timing(Stats(ttft_s=ttft, total_s=total, **parts), tokens, arrivals)  # type: ignore[arg-type]


def test_quantiles_by_hand() -> None:
    found = latency([timing(float(n), arrivals=(0.0, 1.0, 3.0)) for n in range(1, 102)], HOW)
    assert [found[f"total_p{q}"].value for q in (50, 95, 99)] == pytest.approx([51, 96, 100])
    assert found["itl_p50"].value == 1.5
    assert found["total_p50"].n == 101
    assert found["total_p50"].low is not None
    assert found["total_p50"].low < 51 < (found["total_p50"].high or 0)


def test_gaps_without_arrivals_are_their_mean() -> None:
    assert timing(1.1).gaps == [0.5]
    assert timing(1.1, tokens=1).gaps == []
    assert "itl_p50" not in latency([timing(1.1, tokens=1)], HOW)
    assert "ttft_p50" not in latency([timing(1.1, tokens=0)], HOW)
    assert latency([], HOW) == {}


def test_shares_of_the_time() -> None:
    parts = {"draft_s": 2.5, "prefill_s": 0.5, "wait_s": 5.5, "queue_s": 1.0, "verify_s": 2.0, "verify_prefill_s": 0.5}
    apart = {"prefill": 1, "draft": 2, "network": 2.5, "queue": 1, "verify": 1.5, "rest": 2}
    assert spent(timing(10, **parts).stats) == apart
    found = latency([timing(10, **parts), timing(30)], HOW)
    assert found["share_draft"].value == pytest.approx(2 / 40)
    assert sum(found[f"share_{name}"].value for name in spent(Stats())) == pytest.approx(1)
    overlapping = spent(timing(4, **parts).stats)  # a pipelined run
    assert overlapping["rest"] == 0
    assert sum(overlapping.values()) == pytest.approx(4)


# All together -----------------------------------------------------------------------------------------------


def test_a_run_is_scored_in_one_call() -> None:
    attributes = list(combinations())[::9]
    items = [
        Item(
            f"{lang}{n}",
            Path("none.wav"),
            lang=lang,
            references=(caption(a, "default", lang),),
            labels=stated(a, "default"),
        )
        for n, a in enumerate(attributes)
        for lang in ("zh", "en")
    ]
    texts = [item.references[0] for item in items]
    found = score(items, texts, texts, Scoring(resampling=HOW))
    best = {"bleu": 100, "chrf": 100, "cider_d": 10, "cloud_chrf": 100, "longest_loop": 0}
    for name in set(found) - {"distinct_1", "distinct_2", "longest_loop"}:
        assert found[name].pooled.value == pytest.approx(best.get(name, 1)), name
        assert found[name].pooled.n == len(items)
    assert {f"attribute_{name}" for name in NAMES if name not in QUALITIES} <= set(found)
    assert not {f"attribute_{name}" for name in QUALITIES} & set(found), "no item is labelled with them"
    assert "same_text" not in score(items[:2], texts[:2], how=Scoring(resampling=HOW))
    with pytest.raises(ValueError, match="zip"):
        score(items, texts[1:])


def test_agreement_by_hand() -> None:
    found = agreement(["ab", "你好"], ["ac", "你好"], ["en", "zh"], HOW)
    assert some(found["same_text"]).pooled.value == 0.5
    assert some(found["cloud_chrf"]).pooled.value == pytest.approx((25 + 100) / 2)


def test_text_that_no_metric_can_read_scores_zero() -> None:
    items = [Item(str(n), prompt="p", references=("a b c d e",)) for n in range(2)]
    found = score(items, ["", "？"], how=Scoring(resampling=HOW))
    assert all(found[name].pooled.value == 0 for name in ("bleu", "chrf", "rouge_l", "cider_d", "format_all"))
    assert all(np.isfinite(result.pooled.value) for result in found.values())
    assert words_module.words("") == ()
