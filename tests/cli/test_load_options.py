"""The options of loading a model reach `load_engine`, whichever command loads it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any

import pytest

from outrider.cli import build, subprocess_cloud
from outrider.cli.edge_cloud import open_cloud
from outrider.cli.options import Models, Network
from outrider.engines import load
from outrider.engines.load_options import LoadOptions
from outrider.errors import SettingsError
from outrider.verifiers import connect

OTHERS = {"dtype": "bfloat16", "device": "cpu", "quantization": "int8", "kv_cache_dtype": "fp8"}
ARGUMENTS = [text for name, value in OTHERS.items() for text in (f"--{name.replace('_', '-')}", value)]
DEFAULTS = asdict(LoadOptions())


def test_each_option_is_covered_here() -> None:
    assert [field.name for field in fields(LoadOptions)] == [*OTHERS]
    assert all(OTHERS[name] != default for name, default in DEFAULTS.items())


@pytest.mark.parametrize("options", [DEFAULTS, OTHERS])
def test_of_edge_and_local_cloud(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    given: list[tuple[str, dict[str, Any]]] = []

    def load_engine(name: str, **keywords: Any) -> None:
        given.append((name, keywords))

    monkeypatch.setattr(load, "load_engine", load_engine)
    monkeypatch.setattr(connect, "load_engine", load_engine)
    models = Models(**options)
    build.load_drafter(models)
    build.connect_verifier(models)
    assert given == [("demo", options), ("demo:cloud", options)]


def test_of_a_served_model() -> None:
    script = (
        "import json, os; from outrider.engines import load\n"
        "def load_engine(name, **options): print(json.dumps(options), flush=True); os._exit(0)\n"
        "load.load_engine = load_engine\n"
        "from outrider.__main__ import main; main()"
    )
    command = [sys.executable, "-c", script, "cloud", "demo", "--listen", "127.0.0.1:0", *ARGUMENTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == OTHERS


@pytest.mark.parametrize(
    ("models", "expected"),
    [(Models(), ["--dtype", "auto", "--device", "auto", "--kv-cache-dtype", "auto"]), (Models(**OTHERS), ARGUMENTS)],
)
def test_of_a_gateway_s_own_cloud(monkeypatch: pytest.MonkeyPatch, models: Models, expected: list[str]) -> None:
    started: list[list[str]] = []

    @contextmanager
    def supervised_cloud(*arguments: str) -> Iterator[None]:
        started.append([*arguments])
        yield

    monkeypatch.setattr(subprocess_cloud, "supervised_cloud", supervised_cloud)
    monkeypatch.setattr(subprocess_cloud, "share_cores", lambda: None)
    with open_cloud(models, Network()):
        assert started == [["demo:cloud", *expected]]


@pytest.mark.parametrize("option", [{"quantization": "int8"}, {"kv_cache_dtype": "fp8"}])
@pytest.mark.parametrize(
    ("cloud", "hint"),
    [
        ("grpc://127.0.0.1:1", r"no model is loaded here\. .*\(outrider cloud --{}\)$"),
        ("vllm://127.0.0.1:1", r"no model is loaded here\. A vLLM or SGLang server has an option of its own$"),
        ("sglang://127.0.0.1:1", r"no model is loaded here\. A vLLM or SGLang server has an option of its own$"),
        ("none", "no model is loaded here$"),
    ],
)
def test_without_a_model_the_place_of_the_option_is_named(option: dict[str, Any], cloud: str, hint: str) -> None:
    name = next(iter(option)).replace("_", "-")
    with pytest.raises(SettingsError, match=hint.format(name)):
        build.check_connection(Models(edge="lookup", cloud=cloud, **option), Network())
