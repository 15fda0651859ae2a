"""The cloud process of `outrider edge`: it loads the model with the options of the command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from outrider.cli import subprocess_cloud
from outrider.cli.edge_cloud import open_cloud
from outrider.cli.options import Models, Network


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (Models(), ["demo:cloud", "--dtype", "auto", "--device", "auto", "--kv-cache-dtype", "auto"]),
        (
            Models(dtype="bfloat16", device="cpu", quantization="int8", kv_cache_dtype="fp8"),
            [
                "demo:cloud",
                "--dtype",
                "bfloat16",
                "--device",
                "cpu",
                "--quantization",
                "int8",
                "--kv-cache-dtype",
                "fp8",
            ],
        ),
    ],
)
def test_an_own_cloud_gets_the_options_of_loading(
    monkeypatch: pytest.MonkeyPatch, models: Models, expected: list[str]
) -> None:
    started: list[list[str]] = []

    @contextmanager
    def supervised_cloud(*arguments: str) -> Iterator[None]:
        started.append([*arguments])
        yield

    monkeypatch.setattr(subprocess_cloud, "supervised_cloud", supervised_cloud)
    monkeypatch.setattr(subprocess_cloud, "share_cores", lambda: None)
    with open_cloud(models, Network()):
        assert started == [expected]
