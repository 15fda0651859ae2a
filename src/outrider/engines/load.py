"""Loading of engines from a directory, a hub id, a `.gguf` file, a bundled checkpoint, or a loaded model."""

from __future__ import annotations

import importlib.util
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.engines.checkpoint import (
    NO_REMOTE_CODE,
    TASKS,
    check_checkpoint,
    check_gguf,
    find_file,
    is_captions_only,
    read_json,
)
from outrider.engines.load_options import LoadOptions
from outrider.engines.locking import LOAD_LOCK, check_process
from outrider.errors import ModelError, OutriderError, SettingsError, quote
from outrider.files import out_of_space
from outrider.hints import install_command

if TYPE_CHECKING:
    from outrider.engines.llama_cpp.engine import GgufEngine
    from outrider.engines.torch.engine import TorchEngine
    from outrider.engines.torch.model_families import AudioFeatures

log = logging.getLogger(__name__)

BUNDLED = Path(__file__).parent.parent / "demo"
_BUNDLED_NAMES = {"demo:edge": "edge", "demo:cloud": "cloud"}
_SHORT_NAMES = {"demo": "demo:edge"}
_AUDIO_TYPES = ("qwen2_5_omni", "qwen2_5_omni_thinker", "qwen2_audio")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def load_engine(
    model: Any,
    *,
    tokenizer: Any = None,
    extractor: Any = None,
    dtype: str = "auto",
    device: str = "auto",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
) -> TorchEngine | GgufEngine:
    """Load a model and give it KV slots.

    Calls from several threads load one after another. A `.gguf` file runs in llama.cpp on the CPU, quantised as it is.
    With a dtype, or on a cuda device, it is dequantised and runs in transformers.

    Args:
        model: a directory or hub id of transformers checkpoints, a `.gguf` file, "demo:edge" (or "demo") or
            "demo:cloud" for the bundled pair, or a transformers model that is loaded already.
        tokenizer, extractor: instead of the checkpoint's own. A loaded model has none.
        dtype: float32, bfloat16, float16, or auto: float32 on a CPU and the checkpoint's own on a GPU.
        device: a torch device such as cpu or cuda:1, or auto: cuda if available (cpu for a `.gguf` file).
        quantization: int8 or int4 rounds the weights of the language model's linear layers to 8 or 4 bits, which
            makes it another model than the checkpoint's. None: the weights are those of the checkpoint.
        kv_cache_dtype: fp8 stores keys and values as float8_e4m3fn and computes with them in the model's dtype, which
            changes the output as well, and makes near ties possible in float32. auto: the model's dtype.

    Raises:
        ModelError: the checkpoint does not exist, is unreadable, lacks weights, has layers that cannot be quantised or
            a cache that cannot be truncated, or a package that it needs is not installed.
        SettingsError: an unknown dtype, device, quantization or kv_cache_dtype, one of the first three for a model that
            is loaded already, or one of the last two for a `.gguf` file.
        StateError: this process was forked from one that had loaded a model.
        OutriderError: the disk is full, or no temporary directory is writable.
    """
    options = LoadOptions(dtype, device, quantization, kv_cache_dtype)
    _check_attribute("tokenizer", tokenizer, "convert_ids_to_tokens", "AutoTokenizer")
    _check_attribute("extractor", extractor, "sampling_rate", "AutoFeatureExtractor")
    if not isinstance(model, (str, Path)):
        return _wrap_model(model, tokenizer, extractor, options)
    options.check_file(str(model))
    path = resolve_path(str(model))
    check_process()
    with LOAD_LOCK:
        return _load(path, full_name(str(model)), tokenizer, extractor, options)


def _check_attribute(name: str, value: Any, attribute: str, source: str) -> None:
    if value is not None and not hasattr(value, attribute):
        raise SettingsError(f"{name}: expected a loaded one, as from {source}, not {type(value).__name__}")


def _load(path: str, name: str, tokenizer: Any, extractor: Any, options: LoadOptions) -> TorchEngine | GgufEngine:
    if path.endswith(".gguf"):
        check_gguf(path, name)
        if options.for_llama_cpp:
            return _load_llama_cpp(path, tokenizer, extractor, name)
    device = options.resolve_device()
    dtype = options.resolve_dtype(device)
    keywords = {"dtype": dtype, "use_safetensors": True, **NO_REMOTE_CODE}
    log.info("loading %s as %s on %s", name, dtype, device)
    with warnings.catch_warnings(), map_load_errors(name):
        warnings.simplefilter("ignore")  # remarks of the loading library about checkpoints are not ours to fix
        if path.endswith(".gguf"):
            loaded, own_tokenizer, own_extractor = *_load_dequantised(path, keywords), None
        else:
            loaded, own_tokenizer, own_extractor = _load_transformers(path, name, keywords)
        if options.quantization is not None:  # before the move: a GPU then needs memory for the quantised weights alone
            from outrider.engines.torch.quantization import quantize

            quantize(loaded, name, options.quantization)
        return _make_engine(loaded.to(device), tokenizer or own_tokenizer, extractor or own_extractor, name, options)


@contextmanager
def map_load_errors(name: str, action: str = "cannot load") -> Iterator[None]:
    """Map the exceptions of model libraries to a `ModelError` that names the model, and a full disk to `OutriderError`.

    The libraries promise no set of exceptions: tokenizers raises bare `Exception`, and Rust panics are not even that.
    """
    try:
        yield
    except OutriderError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        full = out_of_space(error)
        if full is not None:  # no fault of the model
            raise OutriderError(f"{action} {name}: {full}") from error
        raise ModelError(f"{action} {name}: {_describe_error(error)}") from error


def _wrap_model(model: Any, tokenizer: Any, extractor: Any, options: LoadOptions) -> TorchEngine:
    if not hasattr(model, "config") or not hasattr(model, "forward"):
        raise ModelError(f"a model is a name or a transformers model, not {type(model).__name__}")
    options.check_loaded()
    with map_load_errors(type(model).__name__, "cannot decode with"):
        return _make_engine(model, tokenizer, extractor, None, options)


def _make_engine(model: Any, tokenizer: Any, extractor: Any, name: str | None, options: LoadOptions) -> TorchEngine:
    # Importing the model library takes seconds, which checking a name does not need.
    from outrider.engines.torch.engine import TorchEngine

    return TorchEngine(model, tokenizer, extractor, name, fp8_cache=options.fp8_cache)


def _load_llama_cpp(path: str, tokenizer: Any, extractor: Any, name: str) -> GgufEngine:
    from outrider.engines.llama_cpp.context import is_installed
    from outrider.engines.llama_cpp.engine import GgufEngine

    if not is_installed():
        raise ModelError(
            f"{name}: llama.cpp is not installed. As it is, compiling llama.cpp: {install_command('gguf')}. "
            f"Or dense in transformers, with a dtype such as float32: {install_command('gguf-dense')}"
        )
    if extractor is not None:
        raise SettingsError(f"{name}: an extractor has no use, as llama.cpp gets no recordings here: leave it out")
    log.info("loading %s into llama.cpp", name)
    with map_load_errors(name):
        return GgufEngine(path, tokenizer, name)


def full_name(name: str) -> str:
    """Return the full name of a model, as used by engines, gate files and results."""
    return _SHORT_NAMES.get(name, name)


def resolve_path(name: str) -> str:
    """Return the path of a local checkpoint, or a hub id unchanged.

    Raises:
        ModelError: the name is neither an existing path nor of the form "owner/name".
    """
    name = full_name(name)
    if name in _BUNDLED_NAMES:
        return str(BUNDLED / _BUNDLED_NAMES[name])
    if not name.strip():
        raise ModelError("a model's name is empty: give a checkpoint's directory, a .gguf file, a hub id, or demo")
    path = _to_path(name)
    if name.endswith(".gguf"):
        if not path.is_file():
            raise ModelError(f"{name} is a directory, not a GGUF file" if path.is_dir() else f"no such file: {name}")
        return str(path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{name} is not a checkpoint: it has no config.json")
        return str(path)
    if path.exists() or not _HUB_ID.fullmatch(name):
        raise ModelError(f"no such model: {name} (give a checkpoint's directory, a .gguf file, a hub id, or demo)")
    return name


def _to_path(name: str) -> Path:
    """Return a name as a path. Raise ModelError if it is too long for the file system."""
    path = Path(name).expanduser()
    try:
        path.exists()
    except OSError as error:
        raise ModelError(f"no such model: {quote(name)}: {error.strerror}") from error
    return path


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of a directory, a hub id or a bundled checkpoint. No weights are needed.

    Raises:
        ModelError: there is no such directory, it holds no tokenizer, or the tokenizer cannot be loaded.
        StateError: this process was forked from one that had loaded a model.
    """
    path = resolve_tokenizer_path(name)
    check_process()
    with LOAD_LOCK, warnings.catch_warnings(), map_load_errors(name, "cannot load the tokenizer of"):
        warnings.simplefilter("ignore")
        tokenizer = _load_tokenizer(path)
    if tokenizer is None:
        raise ModelError(f"{name} holds no tokenizer: expected one of {', '.join(_TOKENIZER_FILES)}")
    return tokenizer


def load_audio_features(name: str) -> AudioFeatures | None:
    """Load the weightless part of a checkpoint's audio encoder: config.json and preprocessor_config.json.

    Returns None without these files, and for a text model.

    Raises:
        ModelError: a file cannot be used.
    """
    path = resolve_tokenizer_path(name)
    with LOAD_LOCK, warnings.catch_warnings(), map_load_errors(name, "cannot load the audio settings of"):
        warnings.simplefilter("ignore")
        if find_file(path, "config.json") is None:
            return None
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        extractor = _load_extractor(path) if config.model_type in _AUDIO_TYPES else None
        if extractor is None:
            return None
        from outrider.engines.torch.model_families import audio_features

        return audio_features(getattr(config, "thinker_config", config), extractor)


def read_eos_ids(name: str) -> tuple[object, ...]:
    """Return the end tokens in a checkpoint's generation_config.json, without validation and without loading the model.

    Raises:
        ModelError: the file is not valid JSON.
    """
    with map_load_errors(name, "cannot read the end tokens of"):
        file = find_file(resolve_tokenizer_path(name), "generation_config.json")
        eos = None if file is None else read_json(file, name).get("eos_token_id")
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)


def resolve_tokenizer_path(name: str) -> str:
    """Return the directory of a local tokenizer, or a hub id unchanged. A config.json is not needed.

    Raises:
        ModelError: the name is neither an existing directory nor of the form "owner/name".
    """
    if not name.strip():
        raise ModelError("a tokenizer's name is empty: give its directory or a hub id, as in lookup:DIRECTORY")
    if name.endswith(".gguf"):
        raise ModelError(f"{name}: the tokenizer of a .gguf file cannot be loaded alone: give a tokenizer's directory")
    path = _to_path(name)
    if full_name(name) in _BUNDLED_NAMES:
        return resolve_path(name)
    if not path.is_dir() and (path.exists() or not _HUB_ID.fullmatch(name)):
        raise ModelError(f"no such tokenizer: {name} (give a directory or a hub id)")
    return str(path)


def captions_only(name: str) -> bool:
    """Return whether a model accepts only recordings, without loading it. False if this is unknown before loading.

    name: a model, or the directory of its tokenizer.

    Raises:
        ModelError: no such model, or its config.json is not valid.
    """
    folder = Path(name).expanduser()
    if full_name(name) in _BUNDLED_NAMES or not folder.is_dir():
        folder = Path(resolve_path(name))
    config = folder / "config.json"  # the file of a hub id may not be downloaded
    return config.is_file() and is_captions_only(read_json(config, name).get(TASKS))


def _load_transformers(path: str, name: str, options: dict[str, object]) -> tuple[Any, Any, Any]:
    import transformers

    check_checkpoint(path, name)
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    if config.is_encoder_decoder:
        raise ModelError(f"{name}: {config.model_type} is an encoder-decoder; outrider takes decoder-only models")
    model = _load_weights(name, _model_class(config), path, options)
    return model, _load_tokenizer(path), _load_extractor(path) if config.model_type in _AUDIO_TYPES else None


def _load_weights(name: str, auto: Any, path: str, options: dict[str, object]) -> Any:
    """Return the model that a class of transformers loads.

    Raises:
        ModelError: the library initialised weights that the checkpoint lacks.
    """
    model, report = auto.from_pretrained(path, output_loading_info=True, **options)
    missing = sorted(map(str, report.get("missing_keys", ())))
    if missing:
        raise ModelError(f"{name} lacks {len(missing)} of the model's weights, the first {missing[0]}")
    return model


def _model_class(config: Any) -> Any:
    import transformers

    if config.model_type.startswith("qwen2_5_omni"):
        return transformers.Qwen2_5OmniThinkerForConditionalGeneration
    if config.model_type == "qwen2_audio":
        return transformers.Qwen2AudioForConditionalGeneration
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ModelError(f"{config.model_type} is not a causal language model that outrider can drive")
    return transformers.AutoModelForCausalLM


def _load_dequantised(path: str, options: dict[str, object]) -> tuple[Any, Any]:
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ModelError(f"{path}: reading GGUF files needs the package {package}: {install_command('gguf-dense')}")
    import transformers

    file = Path(path)
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    folder, options["gguf_file"] = str(file.parent), file.name
    model = _load_weights(path, transformers.AutoModelForCausalLM, folder, options)
    return model, transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file.name, **NO_REMOTE_CODE)


def _load_tokenizer(path: str) -> Any:
    """Return the checkpoint's tokenizer with its chat template, or None if it has none."""
    from transformers import AutoTokenizer

    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if not tokenizer.chat_template:  # Qwen2.5-Omni and Qwen2-Audio keep it with the processor
        file = find_file(path, "chat_template.json")
        template = None if file is None else read_json(file, path).get("chat_template")
        tokenizer.chat_template = template if isinstance(template, str) else None
    return tokenizer


def _load_extractor(path: str) -> Any:
    from transformers import WhisperFeatureExtractor

    folder = Path(path)
    if folder.is_dir() and not (folder / "preprocessor_config.json").is_file():
        return None
    return WhisperFeatureExtractor.from_pretrained(path, trust_remote_code=False)


def _describe_error(error: BaseException) -> str:
    """Return the error as one line."""
    text = str(error).strip()
    if "trust_remote_code" in text or "requires you to execute" in text:
        return "it needs Python code of its own (auto_map), which is never run: give a model that transformers supports"
    if isinstance(error, MemoryError):
        return "there is not enough memory"
    if isinstance(error, RecursionError):
        return "one of its files is nested too deeply"
    first = text.splitlines()[0] if text else ""
    is_plain = isinstance(error, (OSError, ValueError, ImportError, RuntimeError)) and first
    return first if is_plain else f"{type(error).__name__}: {first}".rstrip(": ")
