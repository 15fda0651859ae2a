"""llama.cpp in this process: a model file, and a context that caches several sequences.

The one module that speaks its C interface. It knows no prompts and no open slots; `engine.py` makes an engine of it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import weakref
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from outrider.errors import ModelError, StateError

log = logging.getLogger(__name__)

N_BATCH = 512  # tokens of one call
N_UBATCH = 128  # tokens read at once within it: the scores of attention are held for as many, over all positions
N_OUTPUTS = 64  # rows of one call: for each, a row of logits is set aside twice
CELL_PADDING = 256  # positions: a sequence's cache is rounded up to a multiple of it
_LOG_LEVEL_ERROR = 4  # llama.cpp's level of what went wrong


class BatchToken(NamedTuple):
    """One token of a call: where it goes, and whether the logits after it are wanted."""

    sequence: int
    position: int
    id: int
    needs_logits: bool


class _LogCapture:
    """What llama.cpp says goes to our log, at debug; its first complaint since `clear` is kept, for an error message.

    The first says what is wrong; those that follow say that it did not work.
    """

    def __init__(self) -> None:
        self.first_error = ""
        self.callback: Any = None  # C holds no reference to it

    def on_log(self, level: int, text: bytes, _: object) -> None:
        line = text.decode("utf-8", "replace").strip()
        if level == _LOG_LEVEL_ERROR and line and not self.first_error:
            self.first_error = line
        log.debug("%s", line)

    def clear(self) -> None:
        self.first_error = ""


_log_capture = _LogCapture()


@cache
def _library() -> Any:
    """The bindings, silenced and initialised."""
    import llama_cpp

    _log_capture.callback = llama_cpp.llama_log_callback(_log_capture.on_log)
    llama_cpp.llama_log_set(_log_capture.callback, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


def is_installed() -> bool:
    return importlib.util.find_spec("llama_cpp") is not None


class LlamaModel:
    """A GGUF file's weights, mapped into memory as they are, or repacked where this CPU reads them faster so.

    Raises:
        ModelError: llama.cpp cannot read the file, or it is no decoder-only language model.
    """

    def __init__(self, path: str) -> None:
        self._lib = _library()
        params = self._lib.llama_model_default_params()
        params.n_gpu_layers = 0
        _log_capture.clear()
        self.pointer = self._lib.llama_model_load_from_file(os.fsencode(path), params)
        if not self.pointer:
            raise ModelError(f"cannot load {path}: {_log_capture.first_error or 'llama.cpp does not say why'}")
        weakref.finalize(self, self._lib.llama_model_free, self.pointer)
        self._vocabulary = self._lib.llama_model_get_vocab(self.pointer)
        self.architecture = self.meta("general.architecture")
        if self._lib.llama_model_has_encoder(self.pointer) or not self._lib.llama_model_has_decoder(self.pointer):
            raise ModelError(f"{path}: {self.architecture} has an encoder; outrider takes decoder-only models")

    @property
    def n_vocab(self) -> int:
        """Ids that can be read."""
        return int(self._lib.llama_vocab_n_tokens(self._vocabulary))

    @property
    def has_vocabulary(self) -> bool:
        """Whether the file has a vocabulary."""
        return bool(self._lib.llama_vocab_type(self._vocabulary) != self._lib.LLAMA_VOCAB_TYPE_NONE)

    @property
    def quantisation(self) -> str:
        """Such as "Q4_K - Medium"."""
        name = self._lib.llama_ftype_name(self._lib.llama_model_ftype(self.pointer))
        return name.decode() if name else "unknown"

    @property
    def n_ctx_train(self) -> int:
        """Positions that the model was made for.

        LongRoPE changes its factors past the original length, for what is cached already: used up to there. YaRN's do
        not change, and its original length says nothing.
        """
        length = int(self._lib.llama_model_n_ctx_train(self.pointer))
        original = self.meta(f"{self.architecture}.rope.scaling.original_context_length")
        if not original or self.meta(f"{self.architecture}.rope.scaling.type") == "yarn":
            return length
        return min(length, int(original))

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """What the file itself says ends a text, or a turn."""
        found = [self.meta(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
        return tuple(dict.fromkeys(int(token) for token in found if token))

    def meta(self, key: str) -> str:
        """A value of the file's metadata as text; "" where there is none."""
        buffer = ctypes.create_string_buffer(256)
        length = self._lib.llama_model_meta_val_str(self.pointer, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if length > 0 else ""


class LlamaContext:
    """Caches for `sequences` sequences, each of up to `length` positions.

    Raises:
        ModelError: the model keeps no cache, or there is no memory for it.
    """

    def __init__(self, model: LlamaModel, sequences: int, length: int, threads: int) -> None:
        self._lib, self._model = _library(), model
        self.sequences, self.length = sequences, pad_length(length)
        params = self._params(threads)
        _log_capture.clear()
        self.pointer = self._lib.llama_init_from_model(model.pointer, params)
        if not self.pointer:
            raise ModelError(
                f"{model.architecture}: llama.cpp makes no cache of {sequences} × {length} positions: "
                f"{_log_capture.first_error or 'it does not say why'}"
            )
        self._batch = self._lib.llama_batch_init(N_BATCH, 0, 1)
        weakref.finalize(self, _free_context, self._lib, self.pointer, self._batch, model)
        self._memory = self._lib.llama_get_memory(self.pointer)
        if not self._memory:
            raise ModelError(f"{model.architecture} keeps no cache in llama.cpp: it is no language model to draft with")

    def _params(self, threads: int) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = self.sequences * self.length, self.sequences
        params.n_batch, params.n_ubatch = N_BATCH, N_UBATCH
        params.n_outputs_max = max(N_OUTPUTS, self.sequences)
        params.n_threads = params.n_threads_batch = threads
        # On CPUs it is no faster, and adds up in 16 bits in short blocks but in 32 in long ones: rows would differ.
        params.flash_attn_type = self._lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.kv_unified = False  # a cache for each sequence, so that one does not shorten another
        params.swa_full = True  # what leaves a sliding window would be gone, and a roll-back may need it
        params.no_perf = True
        return params

    def decode(self, tokens: Seq[BatchToken]) -> list[np.ndarray]:
        """Read up to BATCH tokens, OUTPUTS of them wanted. Their logits, float32 [V]: views, void with the next call.

        Raises:
            StateError: llama.cpp refuses the tokens; what it has read of them is for the caller to forget.
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
        return [self._logits_at(i) for i, token in enumerate(tokens) if token.needs_logits]

    def _logits_at(self, i: int) -> np.ndarray:
        return np.ctypeslib.as_array(self._lib.llama_get_logits_ith(self.pointer, i), (self._model.n_vocab,))

    def truncate(self, sequence: int, length: int) -> bool:
        """Forget all but the first `length` positions; False where this model's memory cannot."""
        return bool(self._lib.llama_memory_seq_rm(self._memory, sequence, length, -1))

    def state_bytes(self, sequence: int) -> int:
        """The size of `state`."""
        return int(self._lib.llama_state_seq_get_size(self.pointer, sequence))

    def state(self, sequence: int) -> ctypes.Array[ctypes.c_uint8]:
        """All that is cached of a sequence."""
        size = self.state_bytes(sequence)
        buffer = (ctypes.c_uint8 * size)()
        written = self._lib.llama_state_seq_get_data(self.pointer, buffer, size, sequence)
        if written != size:
            raise StateError(f"llama.cpp saved {written} of {size} bytes of sequence {sequence}")
        return buffer

    def restore(self, sequence: int, state: ctypes.Array[ctypes.c_uint8]) -> None:
        """What `state` gave, perhaps in another context of the same model."""
        if not self._lib.llama_state_seq_set_data(self.pointer, state, len(state), sequence):
            raise StateError(f"llama.cpp could not restore {len(state)} bytes of sequence {sequence}")


def _free_context(library: Any, context: Any, batch: Any, _: LlamaModel) -> None:
    """Of a context that is gone. Its model is an argument, so that it is freed later, in whatever order they die."""
    library.llama_batch_free(batch)
    library.llama_free(context)


def max_sequences() -> int:
    """What one context can hold."""
    return int(_library().llama_max_parallel_sequences())


def pad_length(length: int) -> int:
    """The positions that a cache of `length` takes."""
    return -(-length // CELL_PADDING) * CELL_PADDING
