"""The base model's LM matrix, for format B heads that share it: from a Hugging Face folder or a GGUF file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import InputError
from .gguf_file import find_gguf, read_gguf
from .heads import LM_HEAD, HeadTensor, MedusaHeads, TensorId, dtype_name
from .source import locate, open_source

_LM_HEAD_KEYS = ("lm_head.weight", "model.lm_head.weight")
# With tied embeddings a checkpoint holds only the embedding matrix.
_EMBEDDING_KEYS = ("model.embed_tokens.weight", "transformer.wte.weight", "embed_tokens.weight")
_GGUF_KEYS = ("output.weight", "token_embd.weight")


def base_lm_head(model: str | Path) -> HeadTensor:
    """The LM matrix [V, H] of a base model (its embedding where tied); the id's head and layer are 0.

    model: a folder with config.json and safetensors, a `.gguf` file or a folder with one, or a repo id.
    Raises InputError if there is none.
    """
    path = locate(model)
    gguf = find_gguf(path)
    if gguf is not None:
        return _gguf_lm_head(gguf)
    source = open_source(path)
    for key in (*_LM_HEAD_KEYS, *_EMBEDDING_KEYS):
        entry = source.entries.get(key)
        if entry is not None:
            if len(entry.shape) != 2 or not entry.dtype.is_floating_point:
                raise InputError(
                    "the base's LM matrix is not a float matrix",
                    file=entry.file,
                    key=key,
                    found=f"{dtype_name(entry.dtype)} {list(entry.shape)}",
                )
            tensor_id = TensorId(0, 0, LM_HEAD)
            return HeadTensor(tensor_id, key, entry.file, entry.shape, dtype_name(entry.dtype), entry.load)
    raise InputError(
        "the base has no LM matrix", file=path, expected=" or ".join((*_LM_HEAD_KEYS, *_EMBEDDING_KEYS))
    )


def check_fits(heads: MedusaHeads, base: HeadTensor) -> None:
    """Raise InputError where the base's H or V is not the heads'."""
    vocab_size, hidden_size = base.shape
    if hidden_size != heads.hidden_size:
        raise InputError(
            "the base does not fit these heads: hidden size differs",
            file=base.file,
            key=base.key,
            expected=f"H {heads.hidden_size}",
            found=f"H {hidden_size}",
        )
    lm_head = heads.lm_head(0)
    if lm_head is not None and heads.token_map() is None and lm_head.shape[0] != vocab_size:
        raise InputError(
            "the base does not fit these heads: vocabulary size differs",
            file=base.file,
            key=base.key,
            expected=f"V {lm_head.shape[0]}",
            found=f"V {vocab_size}",
        )


def with_own_lm_heads(heads: MedusaHeads, base: HeadTensor) -> MedusaHeads:
    """Format B to A: every head gets the base's LM matrix."""
    tensors = {}
    for tensor_id, tensor in heads.tensors.items():
        tensors[tensor_id] = tensor
        following = TensorId(tensor_id.head, tensor_id.layer + 1, LM_HEAD)
        last_of_layer = tensor_id.role == "resblock.bias" or not heads.has_bias
        if following.layer == heads.num_layers and last_of_layer:
            tensors[following] = replace(base, id=following)
    return replace(heads, tensors=tensors, vocab_size=base.shape[0])


def without_lm_heads(heads: MedusaHeads) -> MedusaHeads:
    """Format A to B: the LM matrices are left to the base."""
    kept = {key: tensor for key, tensor in heads.tensors.items() if key.role != LM_HEAD}
    return replace(heads, tensors=kept)


def differing_lm_heads(heads: MedusaHeads, base: HeadTensor) -> list[int]:
    """Heads whose LM matrix is not, value for value, the base's; [] means format B would lose nothing."""
    reference = base.load()
    assert isinstance(reference, Tensor)
    differing = []
    for head in range(heads.num_heads):
        tensor = heads.lm_head(head)
        value = None if tensor is None or tensor.quantized else tensor.load()
        if not isinstance(value, Tensor) or not _equal(value, reference):
            differing.append(head)
    return differing


def _equal(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape:
        return False
    step = max(1, (1 << 22) // max(1, first.shape[1]))
    wide = torch.promote_types(first.dtype, second.dtype)
    blocks = (slice(start, start + step) for start in range(0, first.shape[0], step))
    return all(torch.equal(first[block].to(wide), second[block].to(wide)) for block in blocks)


def _gguf_lm_head(file: Path) -> HeadTensor:
    gguf = read_gguf(file)
    key = next((name for name in _GGUF_KEYS if name in gguf.tensors), None)
    if key is None:
        raise InputError("the base has no LM matrix", file=file, expected=" or ".join(_GGUF_KEYS))
    tensor_id = TensorId(0, 0, LM_HEAD)
    shape = gguf.tensors[key].shape
    return HeadTensor(tensor_id, key, file, shape, "fp32", lambda: torch.from_numpy(gguf.load(key)))
