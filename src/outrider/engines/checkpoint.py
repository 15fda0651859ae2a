"""Checks of a checkpoint's files, before loading.

A checkpoint is data. Its own Python code never runs, pickles are never opened, and no file of it may point to another
repository. Sizes are compared with those of the stored tensors, so that a false size allocates nothing.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from outrider.errors import ModelError, quote

WEIGHTS_FILE, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
TASKS = "outrider_tasks"  # of config.json: the tasks that the checkpoint was trained for; without it, any
# In every call of a `from_pretrained`: None, the default of some, asks on standard output and runs code on a "y".
NO_REMOTE_CODE = {"trust_remote_code": False}
_LARGEST_HEADER = 100 * 2**20  # bytes, as in the safetensors library
_LARGEST_JSON = 64 * 2**20  # bytes; the largest known index has 6 MB
_POSITIVE_FIELDS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_LAYER_FIELDS = re.compile(r"(^|_)(n_)?layers?$")
_SIZE_FIELDS = re.compile(r"(^|_)(size|dim|heads|d_model|n_embd|n_head|n_inner|channels|experts|bins)$")
_KERNEL_FIELDS = re.compile(r"(attn|experts)_implementation$")


def check_checkpoint(path: str, name: str) -> None:
    """Refuse a checkpoint that is more than data, or has impossible sizes. path: a directory or a hub id.

    Raises:
        ModelError: the checkpoint is an adapter, holds pickles only, names code elsewhere, lacks shards, or has a
            configuration that contradicts its weights. The message names the file.
    """
    if find_file(path, "adapter_config.json") is not None:
        raise ModelError(
            f"{name} is an adapter (adapter_config.json) for another model: merge it into that model, save the result "
            "as safetensors, and give that directory"
        )
    config = read_json(find_file(path, "config.json"), name)
    check_config(config, name)
    _check_sizes(config, list(_tensor_shapes(path, name)), name)


def check_config(config: Mapping[str, object], name: str) -> None:
    """Refuse a configuration that would fetch code or weights from elsewhere.

    Raises:
        ModelError: naming the field.
    """
    for key, value in _walk_fields(config):
        kernels = [each for each in (value.values() if isinstance(value, dict) else [value]) if isinstance(each, str)]
        if _KERNEL_FIELDS.search(key) and any("/" in each or ":" in each for each in kernels):
            raise ModelError(f"{name}: config.json: {key} names code in another repository, which is never run")
    weights = config.get("transformers_weights")
    if weights is not None:
        raise ModelError(
            f"{name}: config.json: transformers_weights: weights are read from {WEIGHTS_FILE} or {WEIGHTS_INDEX} only"
        )


def is_captions_only(tasks: object) -> bool:
    """Return whether a checkpoint takes recordings alone as prompts. tasks: `outrider_tasks` of its config.json."""
    return bool(tasks == ["caption"])


def find_file(path: str, file: str) -> Path | None:
    """Return a checkpoint's file, downloaded if the path is a hub id, or None if there is none."""
    folder = Path(path)
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    from transformers.utils import cached_file

    found = cached_file(path, file, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def read_json(file: Path | None, name: str) -> dict[str, object]:
    """Return a JSON file's object.

    Raises:
        ModelError: no such file, too large, not valid JSON, or not an object.
    """
    if file is None:
        raise ModelError(f"{name} is not a checkpoint: it has no config.json")
    if file.stat().st_size > _LARGEST_JSON:
        raise ModelError(f"{name}: {file.name} has {file.stat().st_size} bytes: expected at most {_LARGEST_JSON}")
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ModelError(f"{name}: {file.name} is not valid JSON: {reason}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{name}: {file.name}: expected a JSON object, not {type(value).__name__}")
    return value


def check_gguf(path: str, name: str) -> None:
    """Refuse a file that is not GGUF.

    Raises:
        ModelError: it is too short, has another magic, or counts more tensors or keys than its bytes can hold.
    """
    size = Path(path).stat().st_size
    with Path(path).open("rb") as file:
        head = file.read(24)
    if len(head) < 24 or head[:4] != b"GGUF":
        raise ModelError(f"{name} is not a GGUF file: it has {size} bytes and begins with {head[:4]!r}")
    version, tensors, keys = struct.unpack("<IQQ", head[4:])
    if version not in (2, 3):
        raise ModelError(f"{name}: GGUF version {version}: expected 2 or 3")
    if (tensors + keys) * 12 > size:  # the smallest entry
        raise ModelError(f"{name} is truncated or damaged: {size} bytes cannot hold {tensors} tensors and {keys} keys")
    if Path(path).with_name("adapter_config.json").is_file():
        raise ModelError(f"{name}: an adapter (adapter_config.json) lies beside it: move one of them elsewhere")


# Weights ----------------------------------------------------------------------------------------------------


def _tensor_shapes(path: str, name: str) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of all stored tensors."""
    for file in _weight_files(path, name):
        for key, entry in _read_header(file, name).items():
            if key != "__metadata__":
                yield _read_shape(entry, f"{name}: {file.name}: {key}")


def _weight_files(path: str, name: str) -> list[Path]:
    single_file = find_file(path, WEIGHTS_FILE)
    if single_file is not None:
        return [single_file]
    index = find_file(path, WEIGHTS_INDEX)
    if index is None:
        folder = Path(path)
        found = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
        pickles = [file for file in found if file.endswith((".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack"))]
        beside = f"; {pickles[0]} is not opened, as a pickle can run code: convert it to safetensors" if pickles else ""
        raise ModelError(f"{name}: no {WEIGHTS_FILE} and no {WEIGHTS_INDEX}{beside}")
    shards = read_json(index, name).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(map(_is_shard, shards.values())):
        raise ModelError(
            f"{name}: {WEIGHTS_INDEX}: weight_map: expected the name of a .safetensors file beside it per tensor"
        )
    files = {shard: find_file(path, shard) for shard in sorted(set(shards.values()))}
    missing = [shard for shard, file in files.items() if file is None]
    if missing:
        raise ModelError(f"{name} lacks {len(missing)} of {len(files)} weight files, the first {missing[0]}")
    return [file for file in files.values() if file is not None]


def _is_shard(shard: object) -> bool:
    return isinstance(shard, str) and shard.endswith(".safetensors") and Path(shard).name == shard


def _read_header(file: Path, name: str) -> dict[str, object]:
    """Return the header of a safetensors file. The library checks its offsets when it loads."""
    size = file.stat().st_size
    with file.open("rb") as source:
        length = int.from_bytes(source.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise ModelError(f"{name}: {file.name} is truncated or damaged: its header has {length} of {size} bytes")
        text = source.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name}: {file.name} is damaged: its header is not valid JSON") from error
    if not isinstance(header, dict):
        raise ModelError(f"{name}: {file.name} is damaged: its header is not a JSON object")
    return header


def _read_shape(entry: object, where: str) -> tuple[int, ...]:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ModelError(f"{where}: damaged: its shape is {shape!r}")
    return tuple(shape)


# Sizes ------------------------------------------------------------------------------------------------------


def _walk_fields(config: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield all fields of a configuration, nested ones included."""
    for key, value in config.items():
        yield key, value
        if isinstance(value, dict):
            yield from _walk_fields(value)


def _check_sizes(config: Mapping[str, object], shapes: list[tuple[int, ...]], name: str) -> None:
    """Refuse more layers than stored tensors, and widths beyond the count of stored numbers."""
    numbers = sum(math.prod(shape) for shape in shapes)
    for key, value in _walk_fields(config):
        if key in _POSITIVE_FIELDS and value is not None and (type(value) is not int or value < 1):
            raise ModelError(f"{name}: config.json: {key} is {quote(value)}: expected a whole number from 1")
        if type(value) is not int:
            continue
        limit = len(shapes) if _LAYER_FIELDS.search(key) else numbers if _SIZE_FIELDS.search(key) else 2**63
        if abs(value) > limit:
            raise ModelError(
                f"{name}: config.json: {key} is {value}, but {len(shapes)} tensors of {numbers} numbers are stored"
            )
