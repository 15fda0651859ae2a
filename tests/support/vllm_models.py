"""The bundled cloud model as vLLM wants it: as the thinker of a whole Qwen2.5-Omni, which is what it serves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from outrider.engines.load import BUNDLED


def write_omni(folder: Path) -> Path:
    """The bundled cloud model, its weights renamed, in `folder`."""
    source = BUNDLED / "cloud"
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, folder)
    config = {
        "model_type": "qwen2_5_omni",
        "architectures": ["Qwen2_5OmniModel"],
        "dtype": "float32",
        "enable_audio_output": False,
        "thinker_config": json.loads((source / "config.json").read_text(encoding="utf-8")),
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = {f"thinker.{name}": tensor for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
