"""Bindings of llama.cpp: a model file, and a context that caches several sequences.

This is the only module that calls the C interface. Slots and prompts belong to `engine.py`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import weakref
from collections.abc import Sequence as Seq
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from outrider.errors import ModelError, StateError

log = logging.getLogger(__name__)

N_BATCH = 512  # tokens per call
N_UBATCH = 128  # tokens computed at once within a call: attention scores take memory for as many, over all positions
N_OUTPUTS = 64  # rows of logits per call: llama.cpp allocates each of them twice
CELL_PADDING = 256  # positions: a sequence's cache is rounded up to a multiple of it
_LOG_LEVEL_ERROR = 4  # llama.cpp's level of errors


class BatchToken(NamedTuple):
    """One token of a call, with its place in the cache."""

    sequence: int
    position: int
    id: int
    needs_logits: bool


class _LogCapture:
    """Receiver of llama.cpp's log. It forwards all lines to the logger, and keeps the first error since `clear`.

    The first error names the cause. Those that follow only report that the call failed.
    """

    def __init__(self) -> None:
        self.first_error = ""
        self.callback: object = None  # C holds no reference to it

    def on_log(self, level: int, text: bytes, _: object) -> None:
        """Log a line of llama.cpp at debug level."""
        line = text.decode("utf-8", "replace").strip()
        if level == _LOG_LEVEL_ERROR and line and not self.first_error:
            self.first_error = line
        log.debug("%s", line)

    def clear(self) -> None:
        """Forget the first error."""
        self.first_error = ""


_log_capture = _LogCapture()


@cache
def _library() -> ModuleType:
    """Return the bindings, initialised, with their log captured."""
    import llama_cpp

    _log_capture.callback = llama_cpp.llama_log_callback(_log_capture.on_log)
    llama_cpp.llama_log_set(_log_capture.callback, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


def is_installed() -> bool:
    """Return whether llama-cpp-python is installed."""
    return importlib.util.find_spec("llama_cpp") is not None


class LlamaModel:
    """Weights of a GGUF file, mapped into memory, or repacked if that is faster on this CPU.

    Raises:
        ModelError: llama.cpp cannot read the file, or it is not a decoder-only language model.
    """

    def __init__(self, path: str) -> None:
        self._lib = _library()
        params = self._lib.llama_model_default_params()
        params.n_gpu_layers = 0
        _log_capture.clear()
        self.pointer = self._lib.llama_model_load_from_file(os.fsencode(path), params)
        if not self.pointer:
            raise ModelError(f"cannot load {path}: {_log_capture.first_error or 'llama.cpp gives no reason'}")
        weakref.finalize(self, self._lib.llama_model_free, self.pointer)
        self._vocabulary = self._lib.llama_model_get_vocab(self.pointer)
        self.architecture = self.meta("general.architecture")
        if self._lib.llama_model_has_encoder(self.pointer) or not self._lib.llama_model_has_decoder(self.pointer):
            raise ModelError(f"{path}: {self.architecture} has an encoder; outrider takes decoder-only models")

    @property
    def n_vocab(self) -> int:
        """Number of ids that the model can read."""
        return int(self._lib.llama_vocab_n_tokens(self._vocabulary))

    @property
    def has_vocabulary(self) -> bool:
        """Return whether the file has a vocabulary."""
        return bool(self._lib.llama_vocab_type(self._vocabulary) != self._lib.LLAMA_VOCAB_TYPE_NONE)

    @property
    def quantisation(self) -> str:
        """Name of the quantisation, such as "Q4_K - Medium"."""
        name = self._lib.llama_ftype_name(self._lib.llama_model_ftype(self.pointer))
        return name.decode() if name else "unknown"

    @property
    def n_ctx_train(self) -> int:
        """Number of positions that the model was made for.

        LongRoPE changes its factors past the original length, for cached positions too. Such a model is used up to its
        original length. YaRN's factors do not change, so its original length is no limit.
        """
        length = int(self._lib.llama_model_n_ctx_train(self.pointer))
        original = self.meta(f"{self.architecture}.rope.scaling.original_context_length")
        if not original or self.meta(f"{self.architecture}.rope.scaling.type") == "yarn":
            return length
        return min(length, int(original))

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a text or a turn, by the file's metadata."""
        found = [self.meta(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
        return tuple(dict.fromkeys(int(token) for token in found if token))

    def meta(self, key: str) -> str:
        """Return a value of the file's metadata as text, or "" if it is absent."""
        buffer = ctypes.create_string_buffer(256)
        length = self._lib.llama_model_meta_val_str(self.pointer, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if length > 0 else ""


class LlamaContext:
    """KV caches for `sequences` sequences, each of up to `length` positions.

    Raises:
        ModelError: the model has no KV cache, or there is no memory for it.
    """

    def __init__(self, model: LlamaModel, sequences: int, length: int, threads: int) -> None:
        self._lib, self._model = _library(), model
        self.sequences, self.length = sequences, pad_length(length)
        params = self._params(threads)
        _log_capture.clear()
        self.pointer = self._lib.llama_init_from_model(model.pointer, params)
        if not self.pointer:
            raise ModelError(
                f"{model.architecture}: llama.cpp cannot allocate a cache of {sequences} × {length} positions: "
                f"{_log_capture.first_error or 'it gives no reason'}"
            )
        self._batch = self._lib.llama_batch_init(N_BATCH, 0, 1)
        weakref.finalize(self, _free_context, self._lib, self.pointer, self._batch, model)
        self._memory = self._lib.llama_get_memory(self.pointer)
        if not self._memory:
            raise ModelError(f"{model.architecture} has no KV cache in llama.cpp: give a decoder-only language model")

    def _params(self, threads: int) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = self.sequences * self.length, self.sequences
        params.n_batch, params.n_ubatch = N_BATCH, N_UBATCH
        params.n_outputs_max = max(N_OUTPUTS, self.sequences)
        params.n_threads = params.n_threads_batch = threads
        # On CPUs it is no faster, and accumulates in 16 bits for short blocks but in 32 for long ones: logits differ.
        params.flash_attn_type = self._lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.kv_unified = False  # a cache per sequence, so that none takes another's positions
        params.swa_full = True  # a roll-back may need positions that have left the sliding window
        params.no_perf = True
        return params

    def decode(self, tokens: Seq[BatchToken]) -> list[np.ndarray]:
        """Feed up to N_BATCH tokens, up to N_OUTPUTS of them with logits.

        Returns the logits, float32 [V] each, as views that are valid until the next call.

        Raises:
            StateError: llama.cpp refuses the tokens. Some may be in the cache: the caller must roll back.
        """
        batch = self._batch
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token.id, token.position, token.needs_logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, token.sequence
        batch.n_tokens = len(tokens)
        _log_capture.clear()
        code = self._lib.llama_decode(self.pointer, batch)
        if code:
            raise StateError(f"llama.cpp could not read {len(tokens)} tokens (code {code}): {_log_capture.first_error}")
        kept = [i for i, token in enumerate(tokens) if token.needs_logits]
        rows = [self._lib.llama_get_logits_ith(self.pointer, i) for i in kept]
        return [np.ctypeslib.as_array(row, (self._model.n_vocab,)) for row in rows]

    def truncate(self, sequence: int, length: int) -> bool:
        """Roll a sequence back to its first `length` positions. Return False if the model's memory cannot."""
        return bool(self._lib.llama_memory_seq_rm(self._memory, sequence, length, -1))

    def state_bytes(self, sequence: int) -> int:
        """Return the size of `state` in bytes."""
        return int(self._lib.llama_state_seq_get_size(self.pointer, sequence))

    def state(self, sequence: int) -> ctypes.Array[ctypes.c_uint8]:
        """Return a copy of a sequence's cache."""
        size = self.state_bytes(sequence)
        buffer = (ctypes.c_uint8 * size)()
        written = self._lib.llama_state_seq_get_data(self.pointer, buffer, size, sequence)
        if written != size:
            raise StateError(f"llama.cpp saved {written} of {size} bytes of sequence {sequence}")
        return buffer

    def restore(self, sequence: int, state: ctypes.Array[ctypes.c_uint8]) -> None:
        """Load a copy made by `state`, in this or another context of the same model."""
        if not self._lib.llama_state_seq_set_data(self.pointer, state, len(state), sequence):
            raise StateError(f"llama.cpp could not restore {len(state)} bytes of sequence {sequence}")


def _free_context(library: ModuleType, context: object, batch: object, _: LlamaModel) -> None:
    """Free a context. The model is an argument to keep it alive until its contexts are freed."""
    library.llama_batch_free(batch)
    library.llama_free(context)


def max_sequences() -> int:
    """Return the largest number of sequences in one context."""
    return int(_library().llama_max_parallel_sequences())


def pad_length(length: int) -> int:
    """Return the number of positions that a cache of `length` occupies."""
    return -(-length // CELL_PADDING) * CELL_PADDING
