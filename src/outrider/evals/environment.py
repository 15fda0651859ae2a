"""Description of a run's hardware, versions, models and data, for run.json."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import outrider
from outrider.evals.manifest import Item


def versions() -> dict[str, str]:
    """Return the versions of outrider and its main dependencies."""
    return {
        "outrider": outrider.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def hardware() -> dict[str, Any]:
    """Describe the machine. cores: usable by this process. memory_bytes: None if unknown."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": _memory(),
        "gpu": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.machine()}",
    }


def data_hash(items: Sequence[Item]) -> str:
    """Return a hash of the items and their recordings, independent of their paths."""
    digest = hashlib.sha256()
    for item in items:
        facts: list[Any] = [item.id, item.prompt, item.messages, item.lang, item.task]
        facts += [item.references, item.labels, item.transcript]
        digest.update(json.dumps(facts, sort_keys=True).encode() + b"\n")
        if item.audio is not None:
            digest.update(bytes.fromhex(file_hash(item.audio)))
    return digest.hexdigest()[:16]


def model(engine: Any) -> dict[str, Any]:
    """Describe an engine: identity of its weights and vocabulary, dtype and device."""
    return {
        "name": engine.name,
        "identity": getattr(engine, "identity", None),
        "vocabulary": engine.fingerprint,
        "dtype": str(getattr(engine, "dtype", "")).removeprefix("torch."),
        "device": str(getattr(engine, "device", "")),
    }


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
