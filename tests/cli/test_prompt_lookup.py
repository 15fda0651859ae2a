"""`--edge lookup` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.cli.calibrate import load_descriptions
from outrider.cli.caption import run_caption
from outrider.cli.edge import Serving, run_edge
from outrider.cli.generate import run_generate
from outrider.cli.options import Decoding, Models, Network, Output, Pair, Run, Speculation
from outrider.engines import load
from outrider.errors import ModelError, OutriderError, SettingsError
from tests.support.gateway_pair import serving_demo_cloud
from tests.support.tiny_models import subword_tokenizer

LOOKUP = Models(edge="lookup")


def generate(models: Models, **groups: object) -> int:
    return run_generate(None, "5 6 7 5 6", False, Run(models, **groups))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("models", "error", "match"),
    [
        (Models("lookup", "none"), SettingsError, r"\(--edge lookup\) cannot decode edge-only"),
        (Models("lookup", "vllm://127.0.0.1:1"), SettingsError, "--edge lookup: vllm does not list its tokens"),
        (Models("lookup", "sglang://127.0.0.1:1"), SettingsError, "--edge lookup: sglang does not list"),
        (Models("lookup:"), ModelError, "a tokenizer's name is empty"),
        (Models("lookup:missing"), ModelError, "no such tokenizer: missing"),
        (Models("lookup:t.gguf"), ModelError, "t.gguf: the tokenizer of a .gguf file"),
        (Models("lookups"), ModelError, "no such model: lookups"),
        (Models("missing+lookup"), ModelError, "no such model: missing "),
        (Models("+lookup"), ModelError, "a model's name is empty"),
        (Models("demo+lookup", "none"), SettingsError, r"\(--edge lookup\) cannot decode edge-only"),
    ],
)
def test_what_cannot_be_used_is_refused_before_a_model_is_loaded(
    models: Models, error: type[OutriderError], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(load, "_load", refuse)
    with pytest.raises(error, match=match):
        generate(models)


def test_gates_with_signals_are_refused_by_the_text_that_was_given() -> None:
    with pytest.raises(SettingsError, match=r"gate maxprob\.mean:0\.3 needs confidence signals"):
        generate(LOOKUP, speculation=Speculation(gate="maxprob.mean:0.3"))
    with pytest.raises(SettingsError, match="on_cloud_loss 'edge-only' needs a draft model"):
        generate(Models("lookup", "grpc://127.0.0.1:1"), network=Network(on_cloud_loss="edge-only"))


def test_commands_that_need_a_draft_model_say_so() -> None:
    with pytest.raises(SettingsError, match="--edge lookup: a calibrated gate needs a draft model"):
        load_descriptions(LOOKUP)
    with pytest.raises(SettingsError, match="--edge lookup: the gateway needs the edge's tokenizer"):
        run_edge("127.0.0.1:0", Pair(LOOKUP), Serving())


@pytest.mark.parametrize(("edge", "tokenizer"), [("lookup", None), ("lookup:demo", "demo"), ("./lookup", None)])
def test_a_directory_of_the_name_lookup_has_a_path(edge: str, tokenizer: str | None) -> None:
    models = Models(edge)
    assert models.uses_lookup == (edge != "./lookup")
    assert models.edge_model == (edge if edge == "./lookup" else None)
    assert models.lookup_tokenizer == tokenizer


@pytest.mark.network
def test_captions_with_the_cloud_s_tokenizer_are_the_cloud_s_own(capsys: pytest.CaptureFixture[str]) -> None:
    recording = str(load.BUNDLED / "clips" / "en-1.ogg")
    outputs = []
    with serving_demo_cloud() as served:
        cloud = f"grpc://{served.address}"
        for models in (Models("demo", cloud), Models("lookup:demo", cloud), Models("demo+lookup", cloud)):
            run = Run(models, decoding=Decoding(max_new_tokens=16), output=Output(json=True))
            assert run_caption([recording], "en", "default", run) == 0
            outputs.append(json.loads(capsys.readouterr().out))
    assert len({output["text"] for output in outputs}) == 1
    assert [output["guarantee"] for output in outputs] == ["exact"] * 3


def test_recordings_without_a_tokenizer_on_the_edge_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    recording = str(load.BUNDLED / "clips" / "en-1.ogg")
    with serving_demo_cloud() as served:
        run = Run(Models("lookup", f"grpc://{served.address}"))
        with pytest.raises(OutriderError, match="texts and recordings, give the target's, as --edge lookup:DIRECTORY"):
            run_caption([recording], "en", "default", run)


def test_texts_for_a_model_of_recordings_are_refused_before_the_cloud_is_reached() -> None:
    with pytest.raises(OutriderError, match="only writes captions of recordings"):
        run_generate("hello", None, False, Run(Models("lookup:demo", "grpc://127.0.0.1:1")))


@pytest.mark.parametrize("edge", ["lookup", "lookup:demo", "demo+lookup"])
def test_the_output_is_that_of_the_cloud_alone(edge: str, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for models in (Models("none", "local:demo"), Models(edge, "local:demo")):
        assert generate(models, decoding=Decoding(max_new_tokens=24), output=Output(json=True)) == 0
        outputs.append(json.loads(capsys.readouterr().out))
    alone, lookup = outputs
    assert lookup["token_ids"] == alone["token_ids"]
    assert lookup["guarantee"] == "exact"
    assert lookup["stats"]["rounds"] < alone["stats"]["rounds"]


def test_a_directory_needs_only_the_tokenizer(tmp_path: Path) -> None:
    subword_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(OutriderError, match="cannot be reached"):
        generate(Models(f"lookup:{tmp_path}", "grpc://127.0.0.1:1"), network=Network(patience=0.1))
