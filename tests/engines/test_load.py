"""From a name to an engine: broken checkpoints are named, and nothing that was asked for is ignored."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider import ModelError, SettingsError, load_engine
from outrider.engines.load import BUNDLED
from tests.support.tiny_text_models import model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    shutil.copytree(BUNDLED / "edge", folder)
    return folder


def drop_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights[sorted(name for name in weights if "layers.1" in name)[0]]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def more_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] += 1
    config["text_config"].pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))


def truncate_weights(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


def mistype_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["hidden_size"] = "wide"
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("spoil", [drop_weights, more_layers, truncate_weights, break_config, mistype_config])
def test_a_broken_checkpoint_is_named_and_never_filled_with_random_weights(
    checkpoint: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(checkpoint)
    with pytest.raises(ModelError, match="checkpoint"):
        load_engine(str(checkpoint))


@pytest.mark.parametrize("name", ["", "  ", "no-such-model", "./missing", "missing.gguf", "a/b/c"])
def test_a_name_that_names_nothing_is_refused(name: str) -> None:
    with pytest.raises(ModelError):
        load_engine(name)


@pytest.mark.parametrize("thing", [None, 5, b"demo", object()])
def test_what_is_no_model_is_refused(thing: object) -> None:
    with pytest.raises(ModelError, match="a model is a name"):
        load_engine(thing)


def test_a_loaded_model_is_not_moved_or_cast_behind_the_caller_s_back() -> None:
    with pytest.raises(SettingsError, match="loaded model"):
        load_engine(model("qwen2"), dtype="bfloat16")


@pytest.mark.parametrize("device", ["toaster", "meta", "cuda"])
def test_devices_that_cannot_be_used_are_named(device: str) -> None:
    with pytest.raises(SettingsError, match=device):
        load_engine("demo:edge", device=device)


def test_a_given_tokenizer_is_the_one_that_is_used() -> None:
    from transformers import AutoTokenizer

    mine = AutoTokenizer.from_pretrained(BUNDLED / "edge", trust_remote_code=False)
    assert load_engine("demo:edge", tokenizer=mine).tokenizer is mine


def test_the_bundled_edge_has_one_name() -> None:
    assert load_engine("demo").name == load_engine("demo:edge").name == "demo:edge"


@pytest.mark.parametrize("value", [5, "name", object()])
@pytest.mark.parametrize("argument", ["tokenizer", "extractor"])
def test_a_tokenizer_or_extractor_of_another_type_is_named(argument: str, value: object) -> None:
    with pytest.raises(SettingsError, match=f"^{argument}: expected a loaded one, .* not {type(value).__name__}"):
        load_engine("demo:edge", **{argument: value})
