"""A text for models that only caption recordings is refused before a model is loaded or a cloud is reached."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from outrider.cli.evaluate import Assistant, Evaluation, run_eval
from outrider.cli.generate import run_generate
from outrider.cli.options import Models, Run
from outrider.engines import load
from outrider.errors import ModelError, PromptError


@pytest.fixture(autouse=True)
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(load, "_load", refuse)
    monkeypatch.setattr("outrider.verifiers.connect.load_engine", refuse)


def copy(folder: Path, config: object) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def generate(models: Models, text: str | None = "Hello", ids: str | None = None, chat: bool = False) -> int:
    return run_generate(text, ids, chat, Run(models))


def evaluate(models: Models, folder: Path) -> int:
    data = folder / "set.jsonl"
    data.write_text('{"id": "q", "prompt": "Hello", "lang": "en"}\n')
    return run_eval(str(data), Evaluation(str(folder / "run")), Assistant(), Run(models))


CAPTIONS_ONLY = [
    Models(),
    Models(edge="demo:edge"),
    Models(cloud="none"),
    Models(edge="none"),
    Models(edge="none", cloud="local:demo:cloud"),
    Models(cloud="grpc://127.0.0.1:1"),
]


@pytest.mark.parametrize("models", CAPTIONS_ONLY)
@pytest.mark.parametrize("run", [generate, partial(generate, chat=True)])
def test_generate(models: Models, run: Callable[[Models], int]) -> None:
    with pytest.raises(PromptError, match="only writes captions of recordings"):
        run(models)


@pytest.mark.parametrize("models", CAPTIONS_ONLY[:4])
def test_eval(models: Models, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="only writes captions of recordings"):
        evaluate(models, tmp_path)
    assert not (tmp_path / "run").exists()


def test_any_checkpoint_is_known_by_its_config(tmp_path: Path) -> None:
    only, both = (copy(tmp_path / name, {"outrider_tasks": tasks}) for name, tasks in CARDS.items())
    with pytest.raises(PromptError, match=f"^{only} only writes captions"):
        generate(Models(edge=only))
    with pytest.raises(AssertionError, match="a model is loaded"):
        generate(Models(edge=both, cloud="none"))


CARDS = {"only": ["caption"], "both": ["caption", "text"]}


def test_ids_are_taken() -> None:
    with pytest.raises(AssertionError, match="a model is loaded"):
        generate(Models(), None, "1 2 3")


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: expected a JSON object"):
        generate(Models(edge=copy(tmp_path / "a", [1])))
