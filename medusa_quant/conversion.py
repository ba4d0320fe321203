"""The conversion: checkpoint -> plan -> stages -> writer, one tensor at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from . import __version__
from .checkpoints import MedusaHeads, load_heads
from .checkpoints.heads import LM_HEAD, WEIGHT
from .errors import InputError
from .plan import ConvertOptions, Plan, PlannedTensor, make_plan, source_files
from .stages import Quantizer, Staged, plain_quantizer, stage
from .workspace.atomic import occupied, replaced_folder
from .workspace.config_files import config_files
from .workspace.manifest import FileEntry, Manifest, is_ours
from .workspace.naming import CONFIG_INI, MANIFEST, is_head_file
from .workspace.stream import stored_dtype_name
from .workspace.writer import PartWriter

# (bytes written, bytes in all, what is being done)
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class ConvertResult:
    """folder: where the files and manifest.json lie. manifest: what was written. plan: as carried out."""

    folder: Path
    manifest: Manifest
    plan: Plan


def convert(
    source: str | Path | MedusaHeads,
    out: str | Path,
    options: ConvertOptions,
    *,
    force: bool = False,
    progress: Progress | None = None,
    quantizer: Quantizer = plain_quantizer,
    finish: Callable[[Path, Manifest], None] | None = None,
) -> ConvertResult:
    """Convert Medusa heads into `out`, atomically: on any error the old content stays as it was.

    source: see `load_heads`. force: replace an existing conversion (other tools' files are kept).
    quantizer: how a float matrix becomes codes. finish: called with the complete staging folder and its
        manifest before it takes its place; may add to `manifest.report`, or raise to keep the old folder.
    Raises InputError for bad input, options or target.
    """
    heads = source if isinstance(source, MedusaHeads) else load_heads(source)
    plan = make_plan(heads, options)
    target = Path(out).expanduser() / plan.layout.folder
    old = check_target(target, plan, force)
    owned = old.owned_files() if old else set()

    def is_owned(name: str) -> bool:
        return name in owned or name == MANIFEST or is_head_file(name)

    # Hashing the source first reads it once in order, which is also the fastest way into the page cache.
    with ThreadPoolExecutor(1) as background, replaced_folder(target, is_owned) as staging:
        digest = background.submit(_hash_source, plan.heads)
        try:
            manifest = _manifest(plan)
            with PartWriter(staging, plan.layout) as writer:
                _write_tensors(plan, writer, manifest, quantizer, progress)
                manifest.source.update(digest.result())
                files = config_files(plan.layout, manifest, target / CONFIG_INI)
                manifest.extra_files = sorted(name for name in files if name != CONFIG_INI)
                for name, text in files.items():
                    writer.write_text(name, text)
                manifest.containers = writer.finish({"medusa_quant": _compact(manifest)})
                if finish is not None:
                    writer.write_text(MANIFEST, manifest.to_json())
                    finish(staging, manifest)
                writer.write_text(MANIFEST, manifest.to_json())
        except BaseException:
            digest.cancel()
            raise
    return ConvertResult(target, manifest, plan)


def check_target(target: Path, plan: Plan, force: bool) -> Manifest | None:
    """The manifest of an earlier conversion in the target, or None. Raises InputError where it may not be
    written: not empty without `force`, a foreign file of a name we need, or the source itself."""
    if not occupied(target):
        return None
    if not force:
        raise InputError("the target exists and is not empty", file=target, fix="pass --force to replace it")
    old = Manifest.read(target / MANIFEST) if is_ours(target / MANIFEST) else None
    owned = old.owned_files() | {MANIFEST} if old else set()
    needed = {part.file for tensor in plan.tensors for part in tensor.parts} | {MANIFEST}
    needed |= set(config_files(plan.layout, None, None)) - {CONFIG_INI}
    for name in sorted(needed):
        if (target / name).exists() and name not in owned and not is_head_file(name):
            raise InputError(
                f"{name} here was not written by this tool and is not replaced",
                file=target,
                fix="choose another --out",
            )
    return old


def _write_tensors(
    plan: Plan, writer: PartWriter, manifest: Manifest, quantizer: Quantizer, progress: Progress | None
) -> None:
    total = plan.bytes
    done = 0
    shared: tuple[object, Staged] | None = None
    # A calibrated quantizer sees other inputs in each head.
    reusable = plan.options.base is not None and quantizer is plain_quantizer
    for planned in plan.tensors:
        if progress is not None:
            progress(done, total, str(planned.tensor.id))
        # Heads that were given the base's LM matrix hold the same tensor: quantize it once.
        origin = (planned.tensor.key, planned.tensor.file, planned.dtype, planned.scheme)
        staged = shared[1] if shared and shared[0] == origin else stage(planned, plan.options, quantizer)
        shared = (origin, staged) if reusable else None
        manifest.files += _store(planned, staged, plan, writer)
        done += planned.bytes
    if progress is not None:
        progress(done, total, "finishing")


def _store(planned: PlannedTensor, staged: Staged, plan: Plan, writer: PartWriter) -> list[FileEntry]:
    tensor = planned.tensor
    entries = []
    shards = {part.rank: part.shard for part in planned.parts}
    for rank, shard in shards.items():
        try:
            parts = plan.layout.parts(tensor.id, staged.value, shard, plan.options.gptq_format)
        except ValueError as error:
            raise InputError(f"{tensor.id}: {error}", file=tensor.file, key=tensor.key) from error
        for part, value in parts.items():
            name = plan.layout.name_of(tensor.id, plan.heads.num_layers, rank, part)
            file = plan.layout.file_of(name, rank)
            dtype = staged.dtype if isinstance(staged.value, Tensor) else value.dtype
            size, digest = writer.write(name, file, value, dtype, staged.clip)
            group_size = planned.scheme.group_size if planned.scheme else tensor.group_size
            entries.append(
                FileEntry(
                    name=name,
                    file=file,
                    head=tensor.id.head,
                    layer=tensor.id.layer,
                    role=tensor.id.role,
                    part=part,
                    rank=rank,
                    shape=list(value.shape),
                    dtype=stored_dtype_name(dtype),
                    bytes=size,
                    sha256=digest,
                    weight_dtype=planned.dtype,
                    tensor_shape=list(tensor.shape),
                    group_size=group_size,
                    split=shard.axis,
                    start=shard.start,
                    stop=shard.stop,
                    method=_method(planned),
                    error=staged.error,
                )
            )
    return entries


def _method(planned: PlannedTensor) -> str:
    """The method that made these values; kept codes keep the name of the one that made them."""
    if planned.method == "keep" and planned.tensor.method:
        return planned.tensor.method
    return planned.method


def _manifest(plan: Plan) -> Manifest:
    heads, options = plan.heads, plan.options
    assert options.dtype is not None
    matrices = [
        planned
        for planned in plan.tensors
        if planned.dtype.startswith("int") and planned.tensor.id.role != "token_map"
    ]
    first = matrices[0] if matrices else None
    dtypes = {planned.dtype for planned in plan.tensors if planned.tensor.id.role in (WEIGHT, LM_HEAD)}
    group_size = None
    # Codes that are kept say themselves what they are, whatever the options ask of new ones.
    resolved: dict[str, Any] = {"act_order": any(planned.tensor.act_order for planned in matrices)}
    if first is not None:
        group_size = first.scheme.group_size if first.scheme else first.tensor.group_size
        resolved["symmetric"] = all(
            planned.scheme.symmetric if planned.scheme else bool(planned.tensor.symmetric)
            for planned in matrices
        )
    return Manifest(
        layout=plan.layout.name,
        source={"path": str(heads.path), "format": heads.format},
        hidden_size=heads.hidden_size,
        vocab_size=heads.vocab_size,
        padded_vocab_size=plan.padded_vocab_size,
        num_heads=heads.num_heads,
        num_layers=heads.num_layers,
        tp=options.tp,
        lm_head="shared" if heads.shared_lm_head else "own",
        lm_head_split=options.lm_head_split,
        weight_type=options.dtype if len(dtypes) == 1 else "mixed",
        group_size=group_size,
        options={**asdict(options), **resolved, "medusa_quant_version": __version__},
        warnings=plan.warnings,
    )


def _compact(manifest: Manifest) -> str:
    return json.dumps(json.loads(manifest.to_json()), separators=(",", ":"), ensure_ascii=False)


def _hash_source(heads: MedusaHeads) -> dict[str, Any]:
    """sha256 of every source file, and one over all of them."""
    files, overall = [], hashlib.sha256()
    for path in source_files(heads):
        digest = hashlib.sha256()
        with open(path, "rb") as handle:
            while block := handle.read(4 << 20):
                digest.update(block)
        files.append({"name": path.name, "bytes": path.stat().st_size, "sha256": digest.hexdigest()})
        overall.update(f"{path.name} {digest.hexdigest()}\n".encode())
    return {"files": files, "sha256": overall.hexdigest()}
