"""The options of loading a model: number formats and device."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from outrider.errors import SettingsError, quote

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = (None, "int8", "int4")
KV_CACHE_DTYPES = ("auto", "fp8")


@dataclass(frozen=True)
class LoadOptions:
    """The options of `load_engine` (load.py).

    Raises:
        SettingsError: an unknown dtype, quantization or format of the KV cache.
    """

    dtype: str = "auto"
    device: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", str(self.device))  # also of a torch.device
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("quantization", self.quantization, QUANTIZATIONS)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)

    @property
    def fp8_cache(self) -> bool:
        """Whether the KV cache holds float8."""
        return self.kv_cache_dtype == "fp8"

    @property
    def for_llama_cpp(self) -> bool:
        """Whether a `.gguf` file runs in llama.cpp, quantised as it is."""
        return self.dtype == "auto" and self.device in ("auto", "cpu")

    def check_file(self, name: str) -> None:
        """Raise SettingsError for a format that a `.gguf` file cannot have."""
        if not name.endswith(".gguf"):
            return
        if self.quantization is not None:
            raise SettingsError(f"quantization {self.quantization}: {name} has a quantisation of its own")
        if self.fp8_cache and self.for_llama_cpp:
            raise SettingsError(f"kv_cache_dtype fp8: {name} runs in llama.cpp, unless a dtype is given")

    def check_loaded(self) -> None:
        """Raise SettingsError for options of weights, for a model that is loaded already."""
        if (self.dtype, self.device, self.quantization) != ("auto", "auto", None):
            raise SettingsError(
                "dtype, device and quantization are for models given by name; move a loaded model with its own .to()"
            )

    def resolve_device(self) -> Any:
        """Return the torch device.

        Raises:
            SettingsError: there is no such device on this machine.
        """
        import torch

        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(name)
        except (RuntimeError, TypeError) as error:
            raise SettingsError(f"device {quote(name)}: expected cpu, cuda or cuda:N") from error
        if device.type not in ("cpu", "cuda"):
            raise SettingsError(f"device {quote(name)}: expected cpu, cuda or cuda:N")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise SettingsError(f"device {quote(name)}: this machine shows no CUDA device")
        return device

    def resolve_dtype(self, device: Any) -> Any:
        """Return the torch dtype of the weights on a device, or "auto" for the checkpoint's own."""
        import torch

        if self.dtype == "auto":
            return torch.float32 if device.type == "cpu" else "auto"
        return getattr(torch, self.dtype)


def load_keywords(options: object) -> dict[str, Any]:
    """Return the keyword arguments of `load_engine` from the attributes of these names."""
    return {field.name: getattr(options, field.name) for field in fields(LoadOptions)}


def _check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    if not (value is None or isinstance(value, str)) or value not in choices:  # an array has no truth value
        raise SettingsError(f"{name} {quote(value)}: expected one of {', '.join(map(str, choices))}")
