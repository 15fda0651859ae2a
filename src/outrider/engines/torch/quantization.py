"""Weight-only int8 quantisation, when a model is loaded: one scale per row of a weight, activations as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outrider.engines.torch.model_families import find_decoder
from outrider.errors import ModelError

LARGEST = 127


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, y = x·Wᵀ·scale + bias, computed in the dtype of x.

    weight: int8 [out, in]. scale: float32 [out], of the weight's rows.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = (weight.abs().amax(1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        self.weight = nn.Parameter((weight / scale[:, None]).round_().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return y [..., out] for x [..., in], in its dtype."""
        if x.dtype == torch.float16:  # sums of products with numbers up to 127 would overflow
            return nn.functional.linear(x, (self.weight * self.scale[:, None]).to(x.dtype), self.bias)
        y = nn.functional.linear(x, self.weight.to(x.dtype)) * self.scale
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def quantize(model: Any, name: str) -> None:
    """Quantise the linear layers of the language model. Embedding, output layer and audio encoder stay as they are.

    Raises:
        ModelError: a matrix of the language model belongs to another kind of layer, or was quantised before.
    """
    decoder, head = find_decoder(model), model.get_output_embeddings()
    if getattr(model.config, "quantization_config", None) is not None:
        raise ModelError(f"{name} cannot be quantised to int8: its checkpoint is quantised already")
    _check_layers(decoder, name)
    for owner in list(decoder.modules()):
        for child_name, child in list(owner.named_children()):
            if type(child) is nn.Linear and child is not head:
                setattr(owner, child_name, Int8Linear(child))


def find_quantization(model: nn.Module, *, fp8_cache: bool = False) -> str | None:
    """Return what makes a model another one than its checkpoint, such as "int8, fp8 KV cache", or None."""
    weights = any(isinstance(module, Int8Linear) for module in model.modules())
    found = ["int8"] * weights + ["fp8 KV cache"] * fp8_cache
    return ", ".join(found) or None


def _check_layers(decoder: nn.Module, name: str) -> None:
    for path, layer in decoder.named_modules():
        if type(layer) is nn.Linear or isinstance(layer, nn.Embedding):
            continue
        for key, weight in layer.named_parameters(path, recurse=False):
            if weight.dim() > 1:
                raise ModelError(
                    f"{name} cannot be quantised to int8, which is for linear layers: {key} belongs to a "
                    f"{type(layer).__name__}"
                )
