"""BERTScore from an encoder in a local folder.

Zhang, Kishore, Wu, Weinberger & Artzi, BERTScore: Evaluating Text Generation with BERT, ICLR 2020 (arXiv:1904.09675),
equation 1: greedy matching of contextual embeddings by cosine, without idf weights and baseline rescaling. As in the
authors' code, special tokens may be matched but do not count in the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.evals.bootstrap import Measure, Resampling, measure
from outrider.evals.overlap import Pair, referenced


class Encoder:
    """A pretrained encoder with its tokenizer. layer: the hidden state to use, −1 for the last, 0 for the embeddings.

    The layer that agrees best with human judgement depends on the model (table 8 of the paper: 17 of 24 for
    roberta-large).

    Raises:
        ModelError: the folder does not contain such a model, or the model has no such layer.
    """

    def __init__(self, folder: Path, layer: int = -1, device: str = "cpu") -> None:
        from transformers import AutoModel, AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            self._model = AutoModel.from_pretrained(
                folder, local_files_only=True, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{folder} holds no encoder for BERTScore: {error}") from error
        self._model.to(device).eval()
        self._layer, self._device = layer, device
        layers = self._model.config.num_hidden_layers
        if not -layers - 1 <= layer <= layers:
            raise ModelError(f"{folder} has layers 0 to {layers}, not {layer}")

    @torch.inference_mode()
    def embed(self, text: str) -> tuple[Tensor, Tensor]:
        """Return unit vectors, float32 [tokens, width], and whether each counts in the mean, bool [tokens]."""
        limit = min(self._tokenizer.model_max_length, self._model.config.max_position_embeddings - 2)
        given: Any = self._tokenizer(
            text, return_tensors="pt", truncation=True, max_length=limit, return_special_tokens_mask=True
        )
        special = given.pop("special_tokens_mask")[0].bool()
        hidden = self._model(**given.to(self._device), output_hidden_states=True).hidden_states[self._layer][0]
        return torch.nn.functional.normalize(hidden, dim=-1).cpu(), ~special


def bertscore(pairs: Sequence[Pair], encoder: Encoder, how: Resampling) -> Measure | None:
    """Return the mean over items of the best reference's F1. Items without references are left out."""
    pairs = referenced(pairs)
    rows = [max(f1(encoder.embed(p.text), encoder.embed(ref)) for ref in p.references) for p in pairs]
    return measure(rows, [p.lang for p in pairs], how)


def f1(text: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]) -> float:
    """Return the F1 of precision (each token of the text with its nearest in the reference) and recall.

    It is 0 for an empty text.
    """
    (a, a_counts), (b, b_counts) = text, reference
    if not a_counts.any() or not b_counts.any():
        return 0.0
    near = a @ b.T
    precision, recall = near.max(1).values[a_counts].mean(), near.max(0).values[b_counts].mean()
    return float(2 * precision * recall / (precision + recall))
