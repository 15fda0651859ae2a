"""Weight-only quantisation to int8 or int4 when a model is loaded. Activations stay as they are."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from outrider.engines.torch.model_families import find_decoder
from outrider.errors import ModelError

LARGEST: Final = 127
GROUP: Final = 32  # int4 weights with one scale


class QuantizedLinear(nn.Module):
    """A linear layer with quantised weights, y = x·Wᵀ + bias, computed in the dtype of x."""

    weight: nn.Parameter
    scale: nn.Parameter
    bias: nn.Parameter | None

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return W [out, in]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return y [..., out] for x [..., in], in its dtype."""
        return nn.functional.linear(x, self.dequantize(x.dtype), self.bias)


class Int8Linear(QuantizedLinear):
    """A linear layer with 8 bits per weight, W = weight·scale.

    weight: int8 [out, in]. scale: float32 [out], of the weight's rows.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = (weight.abs().amax(1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        self.weight = _constant((weight / scale[:, None]).round_().to(torch.int8))
        self.scale = _constant(scale)
        self.bias = linear.bias

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return (self.weight * self.scale[:, None]).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float16:  # sums of products with numbers up to 127 would overflow
            return super().forward(x)
        y = nn.functional.linear(x, self.weight.to(x.dtype)) * self.scale  # fewer products than with `dequantize`
        return (y if self.bias is None else y + self.bias).to(x.dtype)


class Int4Linear(QuantizedLinear):
    """A linear layer with 4 bits per weight and one scale per 32 weights of a row, W = 16·level·scale.

    This is the rounding of ggml's Q4_0. weight: int8 [out, in / 2], `in` rounded up to whole groups of 32. The low
    nibbles hold the levels (-8 to 7) of the first half of a row, the high nibbles those of the second half. scale:
    bfloat16 [out, groups], a sixteenth of the distance between two levels. It is signed, so that the weight of the
    largest magnitude has level -8.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        weight = nn.functional.pad(linear.weight.detach().float(), (0, -self.in_features % GROUP))
        groups = weight.view(linear.out_features, -1, GROUP)
        furthest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
        distance = (furthest / -8).bfloat16()
        distance[distance == 0] = 1  # in a group of zeros
        levels = (groups / distance.float()).round_().clamp_(-8, 7).to(torch.int8)
        low, high = levels.flatten(1).chunk(2, 1)
        self.weight = _constant(low & 15 | high << 4)
        self.scale = _constant(distance.squeeze(2) / 16)
        self.bias = linear.bias

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        sixteenths = torch.cat((self.weight << 4, self.weight & -16), 1)  # levels·16: one shift instead of three
        groups = sixteenths.to(dtype).view(len(self.weight), -1, GROUP)
        return groups.mul_(self.scale[..., None].to(dtype)).flatten(1)[:, : self.in_features]


QUANTIZED_LAYERS: Final[dict[str, type[QuantizedLinear]]] = {"int8": Int8Linear, "int4": Int4Linear}


def quantize(model: Any, name: str, quantization: str) -> None:
    """Quantise the linear layers of the language model. Embedding, output layer and audio encoder stay as they are.

    quantization: int8 or int4.

    Raises:
        ModelError: a matrix of the language model belongs to another kind of layer, or was quantised before.
    """
    decoder, head = find_decoder(model), model.get_output_embeddings()
    if getattr(model.config, "quantization_config", None) is not None:
        raise ModelError(f"{name} cannot be quantised to {quantization}: its checkpoint is quantised already")
    _check_layers(decoder, name, quantization)
    for owner in list(decoder.modules()):
        for child_name, child in list(owner.named_children()):
            if type(child) is nn.Linear and child is not head:
                setattr(owner, child_name, QUANTIZED_LAYERS[quantization](child))


def find_quantization(model: nn.Module, *, fp8_cache: bool = False) -> str | None:
    """Return what makes a model another one than its checkpoint, such as "int8, fp8 KV cache", or None."""
    kinds = {type(module) for module in model.modules()}
    found = [name for name, layer in QUANTIZED_LAYERS.items() if layer in kinds] + ["fp8 KV cache"] * fp8_cache
    return ", ".join(found) or None


def _constant(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def _check_layers(decoder: nn.Module, name: str, quantization: str) -> None:
    for path, layer in decoder.named_modules():
        if type(layer) is nn.Linear or isinstance(layer, nn.Embedding):
            continue
        for key, weight in layer.named_parameters(path, recurse=False):
            if weight.dim() > 1:
                raise ModelError(
                    f"{name} cannot be quantised to {quantization}, which is for linear layers: {key} belongs to a "
                    f"{type(layer).__name__}"
                )
