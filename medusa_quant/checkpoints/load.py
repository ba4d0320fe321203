"""Reading any checkpoint into `MedusaHeads`: the tensors decide, the config only hints."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import torch

from ..errors import InputError
from .formats import BASE_PREFIXES, FORMATS, LM_HEAD, RESBLOCK, TOKEN_MAP, KeyFormat, KeyParts
from .heads import BIAS, WEIGHT, HeadTensor, MedusaHeads, TensorId, dtype_name
from .heads import LM_HEAD as LM_HEAD_ROLE
from .heads import TOKEN_MAP as TOKEN_MAP_ROLE
from .packed import packed_matrix
from .source import Source, open_source
from .store import StoredTensor

Parts = dict[str, StoredTensor]


def load_heads(source: str | Path, *, tp_rank: int | None = None) -> MedusaHeads:
    """Open Medusa heads: any checkpoint format, a Hugging Face repo id, or a folder this tool wrote.

    tp_rank: only for converted folders: the shard of one rank instead of the merged matrices.
    Reads headers, not data. Raises InputError naming file, key, expected and found.
    """
    from ..workspace import Workspace, workspace_heads

    workspace = Workspace.find(source)
    if workspace is not None:
        return workspace_heads(workspace, tp_rank=tp_rank)
    if tp_rank is not None:
        raise InputError("not a folder with rank files", file=source, fix="run `medusa-quant convert` first")
    return _read_checkpoint(open_source(source))


def _read_checkpoint(source: Source) -> MedusaHeads:
    key_format, parsed = _detect_format(source)
    modules: dict[tuple[str, int, int], Parts] = defaultdict(dict)
    for key, parts in parsed.items():
        modules[parts[:3]][parts.part] = source.entries[key]
    resblocks = {(h, layer): parts for (module, h, layer), parts in modules.items() if module == RESBLOCK}
    lm_heads = {(h, layer): parts for (module, h, layer), parts in modules.items() if module == LM_HEAD}
    num_heads, num_layers = _count(source, resblocks, lm_heads)

    tensors: list[HeadTensor] = []
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors += _resblock(source, head, layer, resblocks[head, layer])
        lm_parts = next((parts for (h, _), parts in lm_heads.items() if h == head), None)
        if lm_parts is not None:
            tensors.append(_matrix(source, TensorId(head, num_layers, LM_HEAD_ROLE), lm_parts))
    token_map = next((parts for (module, _, _), parts in modules.items() if module == TOKEN_MAP), None)
    if token_map is not None:
        entry = token_map["weight"]
        tensor_id = TensorId(0, num_layers, TOKEN_MAP_ROLE)
        tensors.append(HeadTensor(tensor_id, entry.key, entry.file, entry.shape, "int32", entry.load))

    hidden_size = tensors[0].shape[1]
    vocab_size = _check_shapes(tensors, hidden_size)
    warnings = _config_warnings(source, num_heads, num_layers, hidden_size, vocab_size, tensors)
    warnings += _alias_warnings(resblocks, num_heads, num_layers)
    hint = source.config.get("vocab_size")
    return MedusaHeads(
        path=source.path,
        format=_describe(key_format, source, lm_heads, tensors),
        num_heads=num_heads,
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size if vocab_size is not None else hint if isinstance(hint, int) else None,
        tensors={tensor.id: tensor for tensor in tensors},
        files=source.files,
        warnings=warnings,
        config=source.config,
    )


def _detect_format(source: Source) -> tuple[KeyFormat, dict[str, KeyParts]]:
    for key_format in FORMATS:
        parsed = {key: parts for key in source.entries if (parts := key_format.parse(key)) is not None}
        if any(parts.module == RESBLOCK for parts in parsed.values()):
            break
    else:
        first = next(iter(source.entries), None)
        raise InputError(
            "no Medusa heads in this checkpoint",
            file=source.path,
            expected="keys such as 0.0.linear.weight, blocks.0.layers.0.weight or medusa_heads.0.*",
            found=first or "no tensors",
        )
    for key, entry in source.entries.items():
        if key not in parsed and not key.startswith(BASE_PREFIXES):
            raise InputError(
                f"unexpected key beside the heads (format {key_format.name})", file=entry.file, key=key
            )
    return key_format, parsed


def _count(
    source: Source, resblocks: dict[tuple[int, int], Parts], lm_heads: dict[tuple[int, int], Parts]
) -> tuple[int, int]:
    """Heads and layers, from the keys; raises InputError for gaps and incomplete heads."""
    heads = {head for head, _ in [*resblocks, *lm_heads]}
    num_heads, num_layers = max(heads) + 1, max(layer for _, layer in resblocks) + 1
    missing = sorted(set(range(num_heads)) - heads)
    if missing:
        raise InputError(
            "gap in head numbers",
            file=source.path,
            expected=f"heads 0..{num_heads - 1}",
            found=f"{sorted(heads)} (missing {', '.join(map(str, missing))})",
        )
    for head in range(num_heads):
        for layer in range(num_layers):
            if (head, layer) not in resblocks:
                raise InputError(
                    f"head {head} lacks ResBlock layer {layer}",
                    file=source.path,
                    expected=f"{num_layers} layers in each of {num_heads} heads",
                    found=f"{sum(1 for h, _ in resblocks if h == head)} layers",
                )
    if lm_heads:
        for head in range(num_heads):
            layers = [layer for h, layer in lm_heads if h == head]
            if not layers:
                raise InputError(
                    f"head {head} has no LM matrix while others have",
                    file=source.path,
                    expected="all or none",
                )
            stray = next((layer for layer in layers if layer not in (-1, num_layers)), None)
            if stray is not None:
                raise InputError(
                    f"head {head}'s LM matrix does not follow its ResBlocks",
                    file=source.path,
                    key=next(iter(lm_heads[head, stray].values())).key,
                    expected=f"layer {num_layers}",
                    found=f"layer {stray}",
                )
    return num_heads, num_layers


def _resblock(source: Source, head: int, layer: int, parts: Parts) -> list[HeadTensor]:
    bias = parts.get("bias")
    tensors = [
        _matrix(source, TensorId(head, layer, WEIGHT), {k: v for k, v in parts.items() if k != "bias"})
    ]
    if bias is not None:
        _require_float(bias)
        tensor_id = TensorId(head, layer, BIAS)
        tensors.append(
            HeadTensor(tensor_id, bias.key, bias.file, bias.shape, dtype_name(bias.dtype), bias.load)
        )
    return tensors


def _matrix(source: Source, tensor_id: TensorId, parts: Parts) -> HeadTensor:
    if set(parts) != {"weight"} or not parts["weight"].dtype.is_floating_point:
        return packed_matrix(source, tensor_id, parts)
    entry = parts["weight"]
    _require_float(entry)
    if len(entry.shape) != 2:
        raise InputError(
            "wrong shape", file=entry.file, key=entry.key, expected="a matrix", found=list(entry.shape)
        )
    return HeadTensor(tensor_id, entry.key, entry.file, entry.shape, dtype_name(entry.dtype), entry.load)


def _require_float(entry: StoredTensor) -> None:
    if entry.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise InputError(
            "unsupported weight dtype",
            file=entry.file,
            key=entry.key,
            expected="fp16, bf16, fp32 or fp64",
            found=dtype_name(entry.dtype),
        )


def _check_shapes(tensors: list[HeadTensor], hidden: int) -> int | None:
    """True V (None without LM matrices). Raises InputError at the first tensor that does not fit."""
    vocab: int | None = None
    with_bias = [tensor for tensor in tensors if tensor.id.role == BIAS]
    weights = [tensor for tensor in tensors if tensor.id.role == WEIGHT]
    if with_bias and len(with_bias) != len(weights):
        have = {(tensor.id.head, tensor.id.layer) for tensor in with_bias}
        bare = next(tensor for tensor in weights if (tensor.id.head, tensor.id.layer) not in have)
        raise InputError(
            f"{bare.id} has no bias while other layers have",
            file=bare.file,
            key=bare.key,
            expected="all or none",
        )
    for tensor in tensors:
        expected: tuple[int, ...]
        if tensor.id.role == WEIGHT:
            expected = (hidden, hidden)
        elif tensor.id.role == BIAS:
            expected = (hidden,)
        elif tensor.id.role == LM_HEAD_ROLE:
            vocab = tensor.shape[0] if vocab is None else vocab
            expected = (vocab, hidden)
        else:
            expected = (vocab or 0,)
        if tensor.shape != expected:
            raise InputError(
                f"{tensor.id}: wrong shape",
                file=tensor.file,
                key=tensor.key,
                expected=list(expected),
                found=list(tensor.shape),
            )
        if 0 in tensor.shape:
            raise InputError(f"{tensor.id}: empty tensor", file=tensor.file, key=tensor.key)
    return vocab


def _config_warnings(
    source: Source,
    num_heads: int,
    num_layers: int,
    hidden: int,
    vocab: int | None,
    tensors: list[HeadTensor],
) -> list[str]:
    found: dict[str, int | None] = {
        "medusa_num_heads": num_heads,
        "num_heads": num_heads if source.config.get("model_type") == "medusa" else None,
        "medusa_num_layers": num_layers,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "truncated_vocab_size": vocab,
    }
    name = source.path / "config.json" if source.path.is_dir() else source.path.with_name("config.json")
    warnings = [
        f"{name}: {key} is {source.config[key]}, the tensors say {value}; going by the tensors"
        for key, value in found.items()
        if value is not None and isinstance(source.config.get(key), int) and source.config[key] != value
    ]
    has_bias = any(tensor.id.role == BIAS for tensor in tensors)
    if source.config.get("medusa_fc_bias") is False and has_bias:
        warnings.append(f"{name}: medusa_fc_bias is false, but the tensors have biases; keeping them")
    return warnings


def _alias_warnings(resblocks: dict[tuple[int, int], Parts], num_heads: int, num_layers: int) -> list[str]:
    """The reference code builds L > 1 heads as copies of one module: its files hold a ResBlock L times."""
    aliased = [
        head
        for head in range(num_heads)
        if num_layers > 1 and all(_same(resblocks[head, 0], resblocks[head, k]) for k in range(1, num_layers))
    ]
    if not aliased:
        return []
    return [
        f"the {num_layers} ResBlocks of head {', '.join(map(str, aliased))} are one and the same tensor "
        "(the reference code aliases them); each is converted as it stands"
    ]


def _same(first: Parts, second: Parts) -> bool:
    if first.keys() != second.keys() or any(first[p].shape != second[p].shape for p in first):
        return False
    if all(first[part].alias is not None and first[part].alias == second[part].alias for part in first):
        return True
    # The smallest part first: a bias settles most cases without reading a matrix.
    parts = sorted(first, key=lambda part: torch.Size(first[part].shape).numel())
    return all(torch.equal(first[part].load(), second[part].load()) for part in parts)


def _describe(
    key_format: KeyFormat,
    source: Source,
    lm_heads: dict[tuple[int, int], Parts],
    tensors: list[HeadTensor],
) -> str:
    name = key_format.name
    if name == "medusa":
        merged = any(key_format.parse(key) is None for key in source.entries)
        name = (
            "merged v1.0 (C)"
            if merged
            else "medusa v0.1 (A)"
            if lm_heads
            else "medusa v2 (B, shared lm_head)"
        )
    packed = next((tensor.method for tensor in tensors if tensor.quantized and tensor.method), None)
    return f"{name}, {packed}" if packed else name
