"""Heads as parameters: forward in the training dtype, through quantized weights where asked for."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from ..checkpoints import MedusaHeads
from ..checkpoints.formats import MEDUSA
from ..errors import InputError
from ..quantization import Scheme, quantize_weight
from ..workspace.atomic import replaced_folder

CHECKPOINT, CONFIG = "medusa_lm_head.safetensors", "config.json"


class TrainableHeads(nn.Module):
    """`heads` heads of `layers` ResBlocks over LM rows of a restricted vocabulary of R tokens.

    weight [heads, layers, H, H] and bias [heads, layers, H] start at zero (each head is then the base's LM
    matrix on the base's state). lm_rows: fp32 [R, H], trained per head where `own_lm_head`, else fixed.
    scheme: quantization every matrix is seen through, with gradients as if it were not there (the
    straight-through estimator, Bengio et al. 2013).
    """

    def __init__(
        self, heads: int, layers: int, lm_rows: Tensor, own_lm_head: bool, scheme: Scheme | None
    ) -> None:
        super().__init__()
        size = lm_rows.shape[1]
        self.scheme, self.own_lm_head = scheme, own_lm_head
        self.weight = nn.Parameter(torch.zeros(heads, layers, size, size))
        self.bias = nn.Parameter(torch.zeros(heads, layers, size))
        if own_lm_head:
            self.lm_rows = nn.Parameter(lm_rows.repeat(heads, 1, 1))
        else:
            # Never changes, so it is quantized once.
            fixed = lm_rows if scheme is None else quantized_values(lm_rows, scheme)
            self.register_buffer("lm_rows", fixed, persistent=False)

    @property
    def num_heads(self) -> int:
        return self.weight.shape[0]

    def forward(self, states: Tensor, head: int) -> Tensor:
        """Logits [n, R] of one head for final hidden states [n, H]."""
        x = states
        for layer in range(self.weight.shape[1]):
            x = x + F.silu(F.linear(x, self._seen(self.weight[head, layer]), self.bias[head, layer]))
        return F.linear(x, self._seen(self.lm_rows[head]) if self.own_lm_head else self.lm_rows)

    def _seen(self, weight: Tensor) -> Tensor:
        if self.scheme is None:
            return weight
        return weight + (quantized_values(weight.detach(), self.scheme) - weight).detach()

    @torch.no_grad()
    def start_from(self, heads: MedusaHeads, rows: Tensor) -> None:
        """Take over the values of existing heads; rows: ids of the restricted vocabulary.

        Raises InputError where they are not of this shape.
        """
        found = (heads.num_heads, heads.num_layers, heads.hidden_size)
        wanted = tuple(self.weight.shape[:3])
        if found != wanted:
            raise InputError(
                "--init heads have another shape",
                file=heads.path,
                expected="{} heads, {} layers, H {}".format(*wanted),
                found="{} heads, {} layers, H {}".format(*found),
            )
        for head in range(heads.num_heads):
            for layer in range(heads.num_layers):
                self.weight[head, layer] = heads.resblock_weight(head, layer).dense().float()
                bias = heads.resblock_bias(head, layer)
                if bias is not None:
                    self.bias[head, layer] = bias.dense().float()
            lm_head = heads.lm_head(head)
            if self.own_lm_head and lm_head is not None:
                self.lm_rows[head] = lm_head.dense()[rows].float()


def quantized_values(weight: Tensor, scheme: Scheme) -> Tensor:
    """What conversion by rounding to nearest would make of a matrix [N, K], in fp32."""
    return quantize_weight(weight, scheme)[0].dequantize().t().float()


def save_heads(
    heads: TrainableHeads,
    out: Path,
    lm_head: Tensor,
    rows: Tensor,
    config: dict[str, object],
    initial: MedusaHeads | None = None,
) -> None:
    """Write format B, or A with own LM matrices, in fp16 and atomically.

    rows: ids of the tokens that were trained; others keep their rows of the heads training started from, or
    of lm_head, the base's.
    """
    count, layers = heads.weight.shape[:2]
    tensors: dict[str, Tensor] = {}
    for head in range(count):
        for layer in range(layers):
            tensors[MEDUSA.resblock_key(head, layer, "weight")] = heads.weight.detach()[head, layer].half()
            tensors[MEDUSA.resblock_key(head, layer, "bias")] = heads.bias.detach()[head, layer].half()
        if heads.own_lm_head:
            own = None if initial is None else initial.lm_head(head)
            full = (lm_head if own is None else own.dense()).half().clone()
            full[rows] = heads.lm_rows.detach()[head].half()
            tensors[MEDUSA.lm_head_key(head, layers, "weight")] = full
    content = {"medusa_num_heads": count, "medusa_num_layers": layers, **config}
    if not heads.own_lm_head:
        content["version"] = "2"
    with replaced_folder(out, lambda name: name in (CHECKPOINT, CONFIG)) as staging:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, staging / CHECKPOINT)
        (staging / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
