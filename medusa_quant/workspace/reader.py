"""`Workspace`: a converted folder with rank files, opened by its manifest."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ..checkpoints.heads import HeadTensor, MedusaHeads, TensorId
from ..checkpoints.store import StoredTensor, read_entries
from ..errors import InputError
from ..quantization import PER_CHANNEL, QuantizedWeight
from .layouts import LAYOUTS
from .manifest import FileEntry, Manifest, is_ours
from .naming import MANIFEST, WEIGHTS_FOLDER
from .sharding import Shard, merge_dense, merge_quantized, shard_of
from .stream import map_file


class Workspace:
    """Reads tensors of a folder written in layout turbomind or safetensors, merged or of one rank.

    folder: where manifest.json lies. manifest: see `Manifest`.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._parts: dict[tuple[TensorId, int], dict[str, FileEntry]] = {}
        for entry in manifest.files:
            self._parts.setdefault((entry.tensor_id, entry.rank), {})[entry.part] = entry
        self._container_entries: dict[str, dict[str, StoredTensor]] = {}

    @classmethod
    def open(cls, path: str | Path) -> Workspace:
        """Open the folder given to `--out`, or the one with the manifest in it.

        Raises InputError if there is none, or its manifest is damaged.
        """
        for folder in _candidates(path):
            if (folder / MANIFEST).is_file():
                return cls(folder, Manifest.read(folder / MANIFEST))
        raise InputError(
            "no manifest.json here", file=path, expected="a folder written by `medusa-quant convert`"
        )

    @classmethod
    def find(cls, path: str | Path) -> Workspace | None:
        """Like `open`, but None where the path is not a folder of rank files written by this tool."""
        for folder in _candidates(path):
            if is_ours(folder / MANIFEST):
                manifest = Manifest.read(folder / MANIFEST)
                if LAYOUTS[manifest.layout].key_format is None:
                    return cls(folder, manifest)
        return None

    @property
    def tensor_ids(self) -> list[TensorId]:
        """Every tensor, in the order it was written."""
        return list(dict.fromkeys(entry.tensor_id for entry in self.manifest.files))

    def entry(self, tensor: TensorId, rank: int = 0) -> FileEntry:
        """The main part (weight, bias or qweight) of a tensor. Raises InputError for an unknown tensor."""
        parts = self._parts.get((tensor, rank))
        if not parts:
            raise InputError(f"{tensor} of rank {rank} is not in the manifest", file=self.folder / MANIFEST)
        return next(parts[part] for part in ("weight", "bias", "qweight") if part in parts)

    def shard(self, tensor: TensorId, rank: int) -> Shard:
        """Which features of a tensor this rank holds."""
        shape = self.entry(tensor).tensor_shape
        return shard_of(tensor.role, shape, rank, self.manifest.tp, self.manifest.lm_head_split)

    def load_rank(self, tensor: TensorId, rank: int) -> Tensor | QuantizedWeight:
        """One rank's part as stored: a float tensor [K, N] or [N] (mapped), or a QuantizedWeight."""
        main = self.entry(tensor, rank)
        parts = {name: self._read(entry) for name, entry in self._parts[tensor, rank].items()}
        if main.part != "qweight":
            return parts[main.part]
        group_size = PER_CHANNEL if main.group_size is None else main.group_size
        shard = self.shard(tensor, rank)
        in_features = shard.stop - shard.start if shard.axis == "input" else main.tensor_shape[1]
        columns = main.shape[1]
        return QuantizedWeight(
            parts["qweight"],
            parts["scales"].view(-1, columns),
            in_features,
            int(main.weight_dtype.removeprefix("int")),
            group_size,
            parts["zeros"].view(-1, columns) if "zeros" in parts else None,
            parts.get("g_idx"),
            parts.get("low_rank_a"),
            parts.get("low_rank_b"),
        )

    def load(self, tensor: TensorId) -> Tensor | QuantizedWeight:
        """All ranks merged, vocabulary padding removed: float (out, in) or [N], or a QuantizedWeight."""
        shard = self.shard(tensor, 0)
        values = [self.load_rank(tensor, rank) for rank in range(self.manifest.tp)]
        if isinstance(values[0], QuantizedWeight):
            return merge_quantized([v for v in values if isinstance(v, QuantizedWeight)], shard)
        return merge_dense([v for v in values if isinstance(v, Tensor)], shard)

    def _read(self, entry: FileEntry) -> Tensor:
        if LAYOUTS[self.manifest.layout].container is None:
            return map_file(self.folder / entry.file, entry.dtype, entry.shape)
        if entry.file not in self._container_entries:
            self._container_entries[entry.file] = read_entries(self.folder / entry.file)
        stored = self._container_entries[entry.file].get(entry.name)
        if stored is None or list(stored.shape) != entry.shape:
            raise InputError(
                "not as the manifest says",
                file=self.folder / entry.file,
                key=entry.name,
                expected=entry.shape,
                found="no such key" if stored is None else list(stored.shape),
            )
        return stored.load()


def workspace_heads(workspace: Workspace, tp_rank: int | None = None) -> MedusaHeads:
    """The heads of a converted folder: merged over ranks, or the shard of one rank.

    With tp_rank, shapes and vocab_size are the shard's (padding included).
    """
    manifest = workspace.manifest
    if tp_rank is not None and not 0 <= tp_rank < manifest.tp:
        raise InputError(
            "no such rank", file=workspace.folder, expected=f"0..{manifest.tp - 1}", found=tp_rank
        )
    tensors = {tensor: _head_tensor(workspace, tensor, tp_rank) for tensor in workspace.tensor_ids}
    return MedusaHeads(
        path=workspace.folder,
        format=f"medusa-quant {manifest.layout}, tp {manifest.tp}",
        num_heads=manifest.num_heads,
        num_layers=manifest.num_layers,
        hidden_size=manifest.hidden_size,
        vocab_size=manifest.vocab_size,
        tensors=tensors,
        files=sorted({workspace.folder / entry.file for entry in manifest.files}),
        warnings=[],
        config=dict(manifest.options),
    )


def _head_tensor(workspace: Workspace, tensor: TensorId, rank: int | None) -> HeadTensor:
    entry = workspace.entry(tensor, rank or 0)
    parts = workspace._parts[tensor, rank or 0]
    shape = tuple(entry.tensor_shape)

    def load() -> Tensor | QuantizedWeight:
        if rank is None:
            return workspace.load(tensor)
        value = workspace.load_rank(tensor, rank)
        return value if isinstance(value, QuantizedWeight) or value.ndim < 2 else value.t()

    if rank is not None:
        shard = workspace.shard(tensor, rank)
        width = shard.stop - shard.start
        if shard.axis == "input":
            shape = (shape[0], width)
        elif shard.axis == "output":
            shape = (width, *shape[1:])
    quantized = entry.part == "qweight"
    return HeadTensor(
        tensor,
        entry.name,
        workspace.folder / entry.file,
        shape,
        entry.weight_dtype,
        load,
        group_size=entry.group_size,
        symmetric="zeros" not in parts if quantized else None,
        act_order="g_idx" in parts,
        scale_dtype=parts["scales"].dtype if quantized else None,
        low_rank=parts["low_rank_a"].shape[1] if "low_rank_a" in parts else 0,
        method=entry.method,
        error=entry.error,
    )


def _candidates(path: str | Path) -> list[Path]:
    folder = Path(path).expanduser()
    if folder.name == MANIFEST:
        folder = folder.parent
    return [folder, folder / WEIGHTS_FOLDER]
