"""A checkpoint is data: none of its code runs, no pickle is opened, and nothing in it names a file of another's."""

from __future__ import annotations

import ast
import json
import pickle
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider import ModelError, load_engine
from outrider.engines.load import BUNDLED

ROOT = Path(__file__).parent.parent.parent
SPY = """
from pathlib import Path

Path(__file__).with_name("MARKER").touch()
raise SystemExit("code of the checkpoint ran")
"""
CODE = {
    "AutoConfig": "spy.Spy",
    "AutoModelForCausalLM": "spy.Spy",
    "AutoModel": "spy.Spy",
    "AutoTokenizer": ["spy.Spy", "spy.Spy"],
    "AutoProcessor": "spy.Spy",
    "AutoFeatureExtractor": "spy.Spy",
}


class Pickled:
    """Runs when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def change(folder: Path, file: str, **fields: Any) -> None:
    """Set fields of a JSON file; "text_config.x" is within text_config."""
    path = folder / file
    value = json.loads(path.read_text()) if path.exists() else {}
    for name, new in fields.items():
        *outer, last = name.split("__")
        inner = value
        for part in outer:
            inner = inner[part]
        inner[last] = new
    path.write_text(json.dumps(value))


def unpack(folder: Path, weights: str = "pytorch_model.bin") -> None:
    (folder / "model.safetensors").unlink()
    (folder / weights).write_bytes(pickle.dumps(Pickled(folder / "MARKER")))


def shard(folder: Path, shard_name: str) -> None:
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Pickled(folder / "MARKER")))
    index = {"metadata": {}, "weight_map": {"model.norm.weight": shard_name, "lm_head.weight": "one.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def add_generate(folder: Path) -> None:
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(SPY)


HOSTILE: dict[str, tuple[Callable[[Path], None], str | None]] = {
    # what is done to the folder, and a word of the refusal; None: it loads, without running anything
    "own model": (lambda f: change(f, "config.json", model_type="spy", auto_map=CODE), "never run"),
    "own text model": (lambda f: change(f, "config.json", text_config__model_type="spy", auto_map=CODE), None),
    "known model": (lambda f: change(f, "config.json", auto_map=CODE), None),
    "other repository": (
        lambda f: change(f, "config.json", model_type="spy", auto_map=dict.fromkeys(CODE, "evil/repo--spy.Spy")),
        "never run",
    ),
    "own tokenizer": (
        lambda f: change(f, "tokenizer_config.json", tokenizer_class="SpyTokenizer", auto_map=CODE),
        "",
    ),
    "known tokenizer": (lambda f: change(f, "tokenizer_config.json", auto_map=CODE), None),
    "own processor": (lambda f: change(f, "processor_config.json", processor_class="Spy", auto_map=CODE), None),
    "own extractor": (
        lambda f: change(f, "preprocessor_config.json", feature_extractor_type="Spy", auto_map=CODE),
        None,
    ),
    "own generation": (lambda f: change(f, "generation_config.json", auto_map=CODE, custom_generate="spy"), None),
    "custom_generate": (add_generate, None),
    "pickle": (unpack, "pickle"),
    "pickled checkpoint": (lambda f: unpack(f, "model.pt"), "pickle"),
    "pickled shard": (lambda f: shard(f, "pytorch_model.bin"), "weight_map"),
    "shard elsewhere": (lambda f: shard(f, "../../elsewhere/one.safetensors"), "weight_map"),
    "weights by name": (
        lambda f: change(f, "config.json", transformers_weights="pytorch_model.bin"),
        "transformers_weights",
    ),
    "adapter": (lambda f: change(f, "adapter_config.json", base_model_name_or_path="evil/repo"), "adapter"),
    "kernels": (lambda f: change(f, "config.json", attn_implementation="evil/kernel"), "attn_implementation"),
    "kernels within": (
        lambda f: change(f, "config.json", text_config__attn_implementation={"": "evil/kernel"}),
        "attn_implementation",
    ),
}

LOADER = """
import json, sys, warnings
warnings.simplefilter("ignore")
from outrider import OutriderError, load_engine
outcomes = {}
for name, folder in json.loads(sys.argv[1]).items():
    try:
        load_engine(folder)
        outcomes[name] = None
    except OutriderError as error:
        outcomes[name] = [type(error).__name__, str(error)]
print(json.dumps(outcomes), file=sys.stderr)
"""


def hostile(folder: Path, name: str) -> Path:
    path = folder / name.replace(" ", "-")
    shutil.copytree(BUNDLED / "edge", path)
    for module in ("spy.py", "configuration_spy.py", "modeling_spy.py", "tokenization_spy.py"):
        (path / module).write_text(SPY)
    HOSTILE[name][0](path)
    return path


def test_no_code_of_a_checkpoint_runs_even_with_consent(tmp_path: Path) -> None:
    folders = {name: str(hostile(tmp_path, name)) for name in HOSTILE}
    done = subprocess.run(
        [sys.executable, "-c", LOADER, json.dumps(folders)],
        input="y\n" * 100,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout == ""
    assert not list(tmp_path.rglob("MARKER"))
    outcomes = json.loads(done.stderr.splitlines()[-1])
    for name, (_, word) in HOSTILE.items():
        found = outcomes[name]
        if word is None:
            assert found is None, (name, found)
        else:
            assert found is not None, name
            assert found[0] == "ModelError", (name, found)
            assert folders[name] in found[1], (name, found)
            assert word in found[1], (name, found)
            assert "trust_remote_code" not in found[1]


@pytest.mark.parametrize("arguments", [["generate", "--prompt-ids", "1 2", "--json", "--cloud", "none", "--edge"]])
def test_the_command_line_asks_nothing(tmp_path: Path, arguments: list[str]) -> None:
    folder = hostile(tmp_path, "own model")
    command = [sys.executable, "-m", "outrider", *arguments, str(folder)]
    done = subprocess.run(command, input="y\n" * 9, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "never run" in done.stderr
    assert not list(tmp_path.rglob("MARKER"))


def calls_of_from_pretrained() -> list[tuple[str, ast.Call]]:
    """Calls in the repository's own code, but for texts of tests like this one."""
    found = []
    for folder in ("src", "tests", "benchmarks", "training", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if "from_pretrained" not in text:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(text)
            for node in ast.walk(tree):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                if node.func.attr == "from_pretrained":
                    found.append((f"{path.relative_to(ROOT)}:{node.lineno}", node))
    return found


def test_every_from_pretrained_forbids_code_and_every_model_s_pickles() -> None:
    calls = calls_of_from_pretrained()
    assert calls
    for place, call in calls:
        given = {word.arg: word.value for word in call.keywords}
        shared = [word.value for word in call.keywords if word.arg is None]
        forbidden = given.get("trust_remote_code")
        by_name = isinstance(forbidden, ast.Constant) and forbidden.value is False
        assert by_name or shared, f"{place}: trust_remote_code=False"
        assert isinstance(call.func, ast.Attribute)
        loads_weights = any(word in ast.unparse(call.func.value).lower() for word in ("model", "auto.", "thinker"))
        safe = given.get("use_safetensors")
        if loads_weights:
            assert (isinstance(safe, ast.Constant) and safe.value is True) or shared, f"{place}: use_safetensors=True"


# Sizes and damage -------------------------------------------------------------------------------------------

FIELDS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    shutil.copytree(BUNDLED / "edge", folder)
    return folder


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [0, -1, 10**12, 2**70, "wide", 1.5, True])
def test_sizes_that_cannot_be_are_refused_before_anything_is_allocated(
    checkpoint: Path, field: str, value: Any
) -> None:
    change(checkpoint, "config.json", **{f"text_config__{field}": value})
    with pytest.raises(ModelError, match=f"checkpoint.*{field}"):
        load_engine(str(checkpoint))


def test_a_million_layers_are_not_built(checkpoint: Path) -> None:
    for field in ("encoder_layers", "num_hidden_layers"):
        change(checkpoint, "config.json", **{f"audio_config__{field}": 10**6})
    with pytest.raises(ModelError, match="layers is 1000000"):
        load_engine(str(checkpoint))


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def edit_header(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def first_tensor(header: dict[str, Any]) -> Any:
    return header[next(name for name in header if name != "__metadata__")]


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "deep config": lambda f: (f / "config.json").write_text(nested(100_000)),
    "deep tokenizer config": lambda f: (f / "tokenizer_config.json").write_text(nested(100_000)),
    "deep generation config": lambda f: (f / "generation_config.json").write_text(nested(100_000)),
    "deep header": lambda f: (f / "model.safetensors").write_bytes(
        len(nested(50_000)).to_bytes(8, "little") + nested(50_000).encode()
    ),
    "list for a config": lambda f: (f / "config.json").write_text("[1, 2]"),
    "text for a config": lambda f: (f / "config.json").write_text('"qwen2"'),
    "not UTF-8": lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"),
    "empty config": lambda f: (f / "config.json").write_text("{}"),
    "empty weights": lambda f: (f / "model.safetensors").write_bytes(b""),
    "short weights": lambda f: (f / "model.safetensors").write_bytes(b"\x01\x02"),
    "endless header": lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64),
    "shape lies": lambda f: edit_header(f, lambda h: first_tensor(h).update(shape=[10**9, 10**9])),
    "negative shape": lambda f: edit_header(f, lambda h: first_tensor(h).update(shape=[-1])),
    "shape is text": lambda f: edit_header(f, lambda h: first_tensor(h).update(shape="big")),
    "offsets lie": lambda f: edit_header(f, lambda h: first_tensor(h).update(data_offsets=[0, 10**15])),
    "unknown dtype": lambda f: edit_header(f, lambda h: first_tensor(h).update(dtype="F7")),
    "missing shard": lambda f: shard(f, "two.safetensors"),
    "empty index": lambda f: (shard(f, "two.safetensors"), (f / "model.safetensors.index.json").write_text("{}")),
    "broken tokenizer": lambda f: (f / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"'),
    "strange tokenizer": lambda f: (f / "tokenizer.json").write_text('{"model": {"type": "Spy"}}'),
    "list for a tokenizer": lambda f: (f / "tokenizer_config.json").write_text("[]"),
    "binary tokenizer": lambda f: (f / "tokenizer.json").write_bytes(bytes(range(256))),
    "broken extractor": lambda f: (f / "preprocessor_config.json").write_text("{"),
    "wide extractor": lambda f: change(f, "preprocessor_config.json", n_fft=10**11),
    "zero extractor": lambda f: change(f, "preprocessor_config.json", hop_length=0, sampling_rate=0),
    "folder for weights": lambda f: ((f / "model.safetensors").unlink(), (f / "model.safetensors").mkdir()),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_its_name(checkpoint: Path, kind: str) -> None:
    DAMAGE[kind](checkpoint)
    with pytest.raises(ModelError, match="checkpoint") as refused:
        load_engine(str(checkpoint))
    assert "unexpected" not in str(refused.value).lower()


@pytest.mark.parametrize("data", [b"", b"GGUF", b"PK\x03\x04" + bytes(60), b"GGUF" + b"\xff" * 60])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_what_is_no_gguf_file_is_refused_by_its_name(tmp_path: Path, data: bytes, dtype: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"model\.gguf"):
        load_engine(str(path), dtype=dtype)
