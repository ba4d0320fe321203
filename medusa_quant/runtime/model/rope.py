"""Rotary position embedding: frequencies as transformers computes them, and a table of cos and sin."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import ModelConfig, RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies fp32 [head_dim / 2] and the factor cos and sin are multiplied by.

    Formulas: RoPE (Su et al. 2021); linear interpolation (Chen et al. 2023); Llama 3.1's smoothed bands;
    YaRN (Peng et al. 2023). Orders of operations follow transformers' modeling_rope_utils, so that
    results agree to the bit.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    periods = rope.theta**exponents
    if rope.type == "linear":
        return 1.0 / periods / rope.params["factor"], 1.0
    if rope.type == "llama3":
        return _llama3(1.0 / periods, rope), 1.0
    if rope.type == "yarn":
        return _yarn(periods, rope, head_dim)
    return 1.0 / periods, 1.0


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    factor, original = rope.params["factor"], rope.params["original_max_position_embeddings"]
    low, high = rope.params["low_freq_factor"], rope.params["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    slowed = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    smoothed = (1 - smooth) * slowed / factor + smooth * slowed
    medium = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return torch.where(medium, smoothed, slowed)


def _yarn(periods: Tensor, rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    params, factor = rope.params, rope.params["factor"]

    def correction(rotations: float) -> float:
        turns = params["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low = correction(params.get("beta_fast") or 32)
    high = correction(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp would divide by zero
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    frequencies = 1.0 / (factor * periods) * (1 - keep) + 1.0 / periods * keep
    scale = params.get("attention_factor")
    if scale is None:
        mscale, all_dim = params.get("mscale"), params.get("mscale_all_dim")
        scale = (
            _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor, 1.0)
        )
    return frequencies, float(scale)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


class RopeTable:
    """cos and sin of every position served, fp32 [positions, head_dim / 2]; grows as positions are used."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        frequencies, self._scale = rope_frequencies(config.rope, config.head_dim)
        self._frequencies = frequencies.to(device)
        self._limit = config.max_position_embeddings
        self.cos = self.sin = torch.empty((0, config.head_dim // 2), device=device)

    def reserve(self, positions: int) -> None:
        """Make rows [0, positions) available."""
        have = self.cos.shape[0]
        if positions <= have:
            return
        rows = max(positions, min(self._limit, max(1024, 2 * have)))
        steps = torch.arange(rows, device=self.cos.device, dtype=torch.float32)
        angles = steps.unsqueeze(1) * self._frequencies
        self.cos, self.sin = angles.cos() * self._scale, angles.sin() * self._scale
