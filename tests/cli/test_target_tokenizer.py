"""The option --target-tokenizer of `outrider generate`, `edge` and `eval`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.cli.edge import Serving, run_edge
from outrider.cli.evaluate import Assistant, Evaluation, run_eval
from outrider.cli.generate import run_generate
from outrider.cli.options import Models, Pair, Run
from outrider.errors import ModelError, SettingsError


def generate(models: Models, tokenizer: str) -> None:
    run_generate(None, "1 2", False, Run(models), target_tokenizer=tokenizer)


def serve(models: Models, tokenizer: str) -> None:
    run_edge("127.0.0.1:0", Pair(models), Serving(), target_tokenizer=tokenizer)


def evaluate(models: Models, tokenizer: str) -> None:
    run_eval("demo", Evaluation("/no/such/folder"), Assistant(), Run(models), target_tokenizer=tokenizer)


COMMANDS = [generate, serve, evaluate]
Command = Callable[[Models, str], None]
REMOTE = "grpc://127.0.0.1:1"


@pytest.mark.parametrize(
    ("command", "models"),
    [
        *((command, Models("lookup:demo", REMOTE)) for command in COMMANDS),
        *((command, Models("demo", "none")) for command in COMMANDS),
        (generate, Models("demo", "local:demo")),
        (evaluate, Models("demo", "local:demo")),
        (generate, Models("none", REMOTE)),
    ],
)
def test_it_is_refused_where_it_has_no_effect(command: Command, models: Models) -> None:
    with pytest.raises(SettingsError, match="--target-tokenizer is for an edge model and a cloud across a network"):
        command(models, "demo")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_tokenizer_is_found_before_a_model_is_loaded(command: Command, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="missing"):
        command(Models("demo", REMOTE), str(tmp_path / "missing"))


def test_the_gateway_s_own_cloud_is_across_a_network(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="missing"):
        serve(Models("demo", "local:demo"), str(tmp_path / "missing"))
