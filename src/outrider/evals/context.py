"""The models and settings of a run: its modes, and the contents of its run.json."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

import outrider
from outrider.config import GenerationSettings
from outrider.edge.prompt_reader import needs_translation
from outrider.engines.base import Engine
from outrider.engines.prompt_lookup import PromptLookup
from outrider.engines.torch.engine import TorchEngine
from outrider.evals import baselines
from outrider.evals.baselines import Assistance, TransformersBaseline
from outrider.evals.manifest import Item
from outrider.evals.modes import OURS, Encoder, Mode, Setup, build, item_prompt, select_modes
from outrider.evals.runner import Tracer
from outrider.evals.store import Row
from outrider.planning.provenance import describe_engine, describe_remote
from outrider.planning.trace_recorder import Recorder
from outrider.verifiers.base import Verifier
from outrider.verifiers.local import LocalVerifier, describe


@dataclass(frozen=True)
class EvalContext:
    """The models of a run, loaded once for all modes, and the decoding settings. draft or verifier may be None.

    lookup: drafts alone, or together with `draft`. target_tokenizer: the verifier's, if the verifier is not in this
    process and has another tokenizer than the drafter.
    """

    draft: Engine | None
    verifier: Verifier | None
    setup: Setup
    assistance: Assistance
    lookup: PromptLookup | None = None
    target_tokenizer: PromptLookup | None = None

    @property
    def target(self) -> Engine | None:
        """Return the verifier's engine if it is in this process, else None."""
        return self.verifier.engine if isinstance(self.verifier, LocalVerifier) else None

    @property
    def settings(self) -> GenerationSettings:
        """Return the generation settings."""
        return GenerationSettings.build(self.setup.generation)

    def modes(self, names: Sequence[str], requested: Sequence[str]) -> tuple[list[Mode], dict[str, str]]:
        """Build the modes of these names. Returns them, and the reasons for those that transformers cannot run.

        Raises:
            SettingsError: a requested mode cannot run.
        """

        def reason(name: str) -> str | None:
            if name not in names:
                return "not chosen"
            return None if name in OURS else baselines.unsupported_reason(name, self.draft, self.target)

        kept, left_out = select_modes(requested, reason)
        left_out = {name: reason for name, reason in left_out.items() if name in names}
        return [self._mode(name, self._encoder(name)) for name in kept], left_out

    def _encoder(self, mode: str) -> Encoder:
        """Return the encoder of a mode's prompts. Only edge-only decoding uses the drafter's ids."""
        reader = self._reader
        if mode != "edge-only" and reader is not None:
            return Encoder(reader)
        return Encoder(self.draft, self._tokenizer, self.target)

    @property
    def _reader(self) -> Engine | PromptLookup | None:
        """The engine or tokenizer that encodes prompts for a target with another tokenizer than the drafter's."""
        target = self.target_tokenizer or self.target
        if self.draft is None or target is None or not needs_translation(self.draft, target):
            return None
        return target

    def _mode(self, name: str, encoder: Encoder) -> Mode:
        if name in OURS:
            return build(name, self.draft, self.verifier, self.setup, encoder, self.lookup)
        target, assistant = self.target, self.draft if name == "assisted" else None
        assert isinstance(target, TorchEngine)  # other engines have an unsupported_reason
        assert isinstance(assistant, TorchEngine | None)
        return TransformersBaseline(target, encoder, self.settings, assistant, self.assistance)

    @property
    def _tokenizer(self) -> PromptLookup | None:
        """The prompt lookup if it has a tokenizer, else None."""
        return self.lookup if self.lookup is not None and self.lookup.tokenizer is not None else None

    def tracer(self) -> Tracer:
        """Return the function that records an item's trace."""
        assert self.draft is not None  # --trace needs both sides
        assert self.verifier is not None
        recorder = Recorder(self.draft, self.verifier, self.settings)
        return lambda item: recorder.trace(item.id, item_prompt(item)).to_json()

    def models(self) -> Row:
        """Return the descriptions of edge and cloud."""
        edge = None if self.draft is None else describe_engine(self.draft)
        if self.lookup is not None:
            sizes = {"min_ngram": self.lookup.min_ngram, "max_ngram": self.lookup.max_ngram}
            edge = {**(edge or {"name": self.lookup.name}), "lookup": sizes}
        if self.target is not None:
            return {"edge": edge, "cloud": describe_engine(self.target)}
        if self.verifier is None:
            return {"edge": edge, "cloud": None}
        reader = self._reader or self.draft or self._tokenizer
        cloud = self.verifier.describe(None if reader is None else describe(reader))
        return {"edge": edge, "cloud": describe_remote(cloud)}


def describe_run(
    context: EvalContext,
    data: str,
    items: Sequence[Item],
    modes: Sequence[Mode],
    left_out: dict[str, str],
    **more: object,
) -> Row:
    """Return the contents of run.json. more: further fields of the configuration."""
    kind, _, path = str(context.setup.options.gate).partition(":")
    configuration = {
        "data": {"name": data, "items": len(items), "hash": data_hash(items)},
        "modes": [mode.name for mode in modes],
        "left_out": left_out,
        "generation": asdict(context.settings),
        "speculation": asdict(context.setup.options),
        "gate_file": file_hash(Path(path)) if kind == "calibrated" else None,
        "repeatable": context.setup.repeatable,
        "assistance": asdict(context.assistance),
        "models": context.models(),
        **more,
    }
    return {
        "format": 1,
        "configuration": configuration,
        "versions": versions(),
        "hardware": hardware(),
    }


def versions() -> dict[str, str]:
    """Return the versions of outrider and its main dependencies."""
    return {
        "outrider": outrider.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def hardware() -> Row:
    """Describe the machine. cores: usable by this process. memory_bytes: None if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    cpus = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory: int | None = None
    with suppress(ValueError, OSError, AttributeError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpus[0] if cpus else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": memory,
        "gpu": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.machine()}",
    }


def data_hash(items: Sequence[Item]) -> str:
    """Return a hash of the items and their recordings, independent of their paths."""
    digest = hashlib.sha256()
    for item in items:
        facts: list[object] = [item.id, item.prompt, item.messages, item.lang, item.task]
        facts += [item.references, item.labels, item.transcript]
        digest.update(json.dumps(facts, sort_keys=True).encode() + b"\n")
        if item.audio is not None:
            digest.update(bytes.fromhex(file_hash(item.audio)))
    return digest.hexdigest()[:16]


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
