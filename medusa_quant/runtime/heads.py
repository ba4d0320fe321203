"""`DraftHeads`: Medusa heads ready to run on accepted hidden states, whatever their format and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..checkpoints import MedusaHeads
from ..errors import InputError
from ..quantization import QuantizedWeight
from .model import LlamaModel
from .model.linear import Linear
from .model.lm_head import VOCAB, LMHead


class DraftHeads:
    """The heads of one checkpoint, packed for a base.

    lm_head_split: with several ranks, how the shards `heads` holds were cut (vocab or hidden).
    activation: "int8" quantizes the hidden states per row for integer weights (heads only draft), "exact"
    keeps them. num_heads, nbytes: what one step reads (a shared LM matrix counted once).
    nan_heads: heads that have given NaN; their guesses are worthless, the text stays right.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        base: LlamaModel,
        activation: str = "int8",
        lm_head_split: str = VOCAB,
    ) -> None:
        config, ranks = base.config, base.split.ranks
        if heads.hidden_size != config.hidden_size:
            raise InputError(
                "these heads are for another base",
                file=heads.path,
                expected=f"H {config.hidden_size}",
                found=f"H {heads.hidden_size}",
            )
        token_map = heads.token_map()
        if token_map is None and heads.vocab_size not in (None, config.vocab_size):
            raise InputError(
                "these heads are for another vocabulary",
                file=heads.path,
                expected=f"V {config.vocab_size}",
                found=f"V {heads.vocab_size}",
            )
        self.num_heads, self.num_layers = heads.num_heads, heads.num_layers
        self.activation, self.nan_heads = activation, set[int]()
        self._base, self._ranks = base, ranks
        self._token_map = None if token_map is None else token_map.dense().long().to(base.device)
        self._blocks = [self._resblocks(heads, layer) for layer in range(heads.num_layers)]
        self.vocab_size = config.vocab_size if token_map is None else token_map.shape[0]
        self._lm_heads: list[LMHead] | None = None
        if not heads.shared_lm_head:
            lm_heads = [heads.lm_head(head) for head in range(heads.num_heads)]
            self._lm_heads = [
                LMHead(self._linear(tensor.load(), None), self.vocab_size, lm_head_split, ranks)
                for tensor in lm_heads
                if tensor is not None
            ]
        self.nbytes = sum(linear.nbytes for block in self._blocks for linear in block)
        self.nbytes += sum(lm_head.nbytes for lm_head in self._lm_heads or [base.lm_head])

    def _linear(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Linear:
        return Linear(weight, bias, self._base.activation_dtype, self.activation, self._base.device)

    def _resblocks(self, heads: MedusaHeads, layer: int) -> list[Linear]:
        """One matrix for all heads in layer 0, where they share their input; one each further on."""
        weights = [heads.resblock_weight(head, layer).load() for head in range(heads.num_heads)]
        found = [heads.resblock_bias(head, layer) for head in range(heads.num_heads)]
        biases = [None if bias is None else bias.dense().float() for bias in found]
        together = _side_by_side(weights) if layer == 0 else None
        if together is None:
            return [self._linear(w, b) for w, b in zip(weights, biases, strict=True)]
        joined = [bias for bias in biases if bias is not None]
        return [self._linear(together, torch.cat(joined) if joined else None)]

    @torch.inference_mode()
    def guess(self, hidden: Tensor, k: int, depth: int | None = None) -> Tensor:
        """The k best tokens of the first `depth` heads (default: of all), int64 [M, depth, k], for final
        hidden states [M, H]. LM matrices of the others, the bulk of the bytes, are not read."""
        depth = self.num_heads if depth is None else depth
        if hidden.shape[0] == 0:
            return torch.empty((0, depth, k), dtype=torch.int64, device=hidden.device)
        tokens, broken = self.propose(hidden, k, depth)
        if bool(broken.any()):
            self.nan_heads |= set(broken.nonzero().flatten().tolist())
        return tokens

    def propose(self, hidden: Tensor, k: int, depth: int) -> tuple[Tensor, Tensor]:
        """As `guess` for M > 0, and which heads gave NaN, bool [depth]; nothing waits for the device."""
        rows, size = hidden.shape
        ranks = self._ranks
        ranks.tell("guess", hidden, k, depth)
        # A rank computes its share of every head's outputs.
        mine = ranks.mine(size)
        states = hidden.repeat(1, self.num_heads)
        for block in self._blocks:
            if len(block) == 1 and self.num_heads > 1:
                own = hidden[:, mine].repeat(1, self.num_heads)
                states = ranks.gather(block[0](hidden, own, activation="silu"), self.num_heads)
                continue
            parts = [
                linear(part, part[:, mine], activation="silu")
                for linear, part in zip(block, states.split(size, 1), strict=True)
            ]
            states = ranks.gather(torch.cat(parts, 1), self.num_heads)
        states = states[:, : depth * size].contiguous()
        if self._lm_heads is None:
            values, tokens = self._base.lm_head.top_k(states.view(rows * depth, size), k)
            values, tokens = values.view(rows, -1, k), tokens.view(rows, -1, k)
        else:
            tops = [
                lm_head.top_k(part, k)
                for lm_head, part in zip(self._lm_heads[:depth], states.split(size, 1), strict=True)
            ]
            values = torch.stack([top[0] for top in tops], 1)
            tokens = torch.stack([top[1] for top in tops], 1)
        broken = values[..., 0].isnan().any(0)
        return (tokens if self._token_map is None else self._token_map[tokens]), broken


def _side_by_side(weights: Sequence[Tensor | QuantizedWeight]) -> Tensor | QuantizedWeight | None:
    """The matrices as one with N = heads * H, or None where they are not of one kind."""
    if all(isinstance(weight, Tensor) for weight in weights):
        dense = [weight for weight in weights if isinstance(weight, Tensor)]
        return torch.cat(dense) if len({weight.dtype for weight in dense}) == 1 else None
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    kinds = {(w.bits, w.group_size, w.zeros is None, w.scales.dtype) for w in quantized}
    plain = all(w.g_idx is None and w.low_rank_a is None for w in quantized)
    if len(quantized) != len(weights) or len(kinds) != 1 or not plain:
        return None
    first = quantized[0]
    return replace(
        first,
        qweight=torch.cat([w.qweight for w in quantized], 1),
        scales=torch.cat([w.scales for w in quantized], 1),
        zeros=None
        if first.zeros is None
        else torch.cat([w.zeros for w in quantized if w.zeros is not None], 1),
    )
