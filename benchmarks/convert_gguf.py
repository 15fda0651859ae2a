"""Turn a `.gguf` file into a transformers checkpoint, once, so that benchmarks and slow tests load in seconds.

python benchmarks/convert_gguf.py MODEL.gguf… OUT_DIR      writes OUT_DIR/<stem>/ in bfloat16
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(source: Path, folder: Path) -> Path:
    """Dequantise `source` and save it under `folder`; does nothing where that was done already."""
    target = folder / source.stem
    if (target / "config.json").is_file():
        return target
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    options = {"gguf_file": source.name, "dtype": torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        quantization_config=GgufConfig(dequantize=True),
        trust_remote_code=False,
        use_safetensors=True,
        **options,
    )
    if hasattr(model.config, "quantization_config"):  # 5.17: the weights are dense now, and could not be saved with it
        del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name, trust_remote_code=False).save_pretrained(
        target
    )
    return target


def main(arguments: list[str]) -> None:
    if len(arguments) < 2:
        sys.exit(__doc__)
    for name in arguments[:-1]:
        print(convert(Path(name), Path(arguments[-1])))


if __name__ == "__main__":
    main(sys.argv[1:])
