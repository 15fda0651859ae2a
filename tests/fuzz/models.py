"""A fuzzer of model folders: each damaged checkpoint loads, or is refused by a `ModelError` that names it.

    python -m tests.fuzz.models --seconds 60 [--seed 1]

Files of the bundled drafter are cut, overwritten, exchanged and given false values. Prints each finding with the seed
that makes it again; the last line on stdout is a JSON object. Exit code 1 where there are findings.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider import ModelError, load_engine
from outrider.engines.load import BUNDLED

MOST_SECONDS = 60.0  # for one folder: the bundled drafter loads in well under a second
MOST_BYTES = 2 * 2**30  # beyond what is in use at the start
STRANGE: tuple[Any, ...] = (
    None, True, 0, -1, 1, 7, 10**6, 10**12, 2**63, 2**80, 0.5, -1e308, "", "x", "../x", "evil/repo", "\x00", [], [1],
    {}, {"": None}, ["a", {}],
)  # fmt: skip


def any_file(random: random.Random, folder: Path) -> Path:
    return random.choice(sorted(path for path in folder.iterdir() if path.is_file()))


def cut(random: random.Random, folder: Path) -> None:
    path = any_file(random, folder)
    data = path.read_bytes()
    path.write_bytes(data[: random.randrange(len(data) + 1)])


def overwrite(random: random.Random, folder: Path) -> None:
    path = any_file(random, folder)
    data = bytearray(path.read_bytes() or b"\0")
    for _ in range(random.choice((1, 4, 64))):
        at = random.randrange(min(len(data), random.choice((64, 4096, len(data)))))
        data[at] = random.randrange(256)
    path.write_bytes(bytes(data))


def remove(random: random.Random, folder: Path) -> None:
    any_file(random, folder).unlink()


def exchange(random: random.Random, folder: Path) -> None:
    shutil.copyfile(any_file(random, folder), folder / "other")
    (folder / "other").replace(any_file(random, folder))


def falsify(random: random.Random, folder: Path) -> None:
    """Give a field of a JSON file, at any depth, another value, another name, or none."""
    path = random.choice(sorted(folder.glob("*.json")))
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return
    places = list(_places(value))
    if places:
        holder, key = random.choice(places)
        kind = random.randrange(4)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[key + "_"] = holder.pop(key)
        else:
            holder[key] = random.choice(STRANGE)
    path.write_text(json.dumps(value))


def _places(value: Any, depth: int = 0) -> Any:
    """Containers and their keys; of long ones, such as a vocabulary, the first."""
    if depth < 8 and isinstance(value, (dict, list)):
        keys = list(value)[:40] if isinstance(value, dict) else range(min(len(value), 8))
        for key in keys:
            yield value, key
            yield from _places(value[key], depth + 1)


def falsify_header(random: random.Random, folder: Path) -> None:
    path = folder / "model.safetensors"
    try:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        entry = header[random.choice(sorted(header))]
        entry[random.choice(sorted(entry))] = random.choice(
            (*STRANGE, [10**9, 10**9], [-1, 4], [0], "F64", "F7", "BF16")
        )
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def nest(random: random.Random, folder: Path) -> None:
    opening, closing = random.choice((("[", "]"), ('{"a":', "}")))
    depth = random.choice((500, 5_000, 100_000))
    random.choice(sorted(folder.glob("*.json"))).write_text(opening * depth + "1" + closing * depth)


DAMAGES: tuple[Callable[[random.Random, Path], None], ...] = (
    cut, overwrite, remove, exchange, falsify, falsify, falsify, falsify_header, falsify_header, nest,
)  # fmt: skip


def attempt(seed: int, folder: Path) -> str | None:
    """Load a damaged checkpoint. Returns what went wrong, or None."""
    path = folder / f"checkpoint-{seed}"
    shutil.copytree(BUNDLED / "edge", path)
    chance = random.Random(seed)
    for damage in chance.choices(DAMAGES, k=chance.choice((1, 1, 1, 2, 3))):
        try:
            damage(chance, path)
        except (IndexError, FileNotFoundError):  # nothing is left to damage
            break
    began = time.monotonic()
    try:
        load_engine(str(path))
    except ModelError as refusal:
        text = str(refusal)
        if path.name not in text or "unexpected" in text.lower() or "trust_remote_code" in text:
            return f"a refusal that does not say it: {text[:300]}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}"
    finally:
        shutil.rmtree(path)
    taken = time.monotonic() - began
    return f"it took {taken:.0f} s" if taken > MOST_SECONDS else None


def run(seconds: float, seed: int) -> tuple[int, dict[int, str]]:
    """Attempts for so many seconds, or one. Returns their number, and findings by seed."""
    logging.disable(logging.CRITICAL)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MOST_BYTES, hard))
    findings: dict[int, str] = {}
    tried, end = 0, time.monotonic() + seconds
    try:
        with tempfile.TemporaryDirectory() as folder:
            while not tried or time.monotonic() < end:
                finding = attempt(seed + tried, Path(folder))
                if finding is not None:
                    findings[seed + tried] = finding
                tried += 1
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        logging.disable(logging.NOTSET)
    return tried, findings


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz model folders.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    tried, findings = run(given.seconds, given.seed)
    for seed, finding in findings.items():
        sys.stderr.write(f"seed {seed}: {finding}\n")
    sys.stdout.write(json.dumps({"tried": tried, "findings": len(findings), "seeds": list(findings)}) + "\n")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
