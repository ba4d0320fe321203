"""Every checkpoint format is read to the same heads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from made import Tensors, as_tensorrt_llm, as_vllm, heads_a, save, save_sharded

from medusa_quant import MedusaHeads, load_heads


def assert_same(heads: MedusaHeads, tensors: Tensors, num_heads: int, num_layers: int) -> None:
    assert (heads.num_heads, heads.num_layers) == (num_heads, num_layers)
    assert len(heads.tensors) == len(tensors)
    for head in range(num_heads):
        for layer in range(num_layers):
            prefix = f"{head}.{layer}.linear"
            assert torch.equal(heads.resblock_weight(head, layer).dense(), tensors[f"{prefix}.weight"])
            bias = heads.resblock_bias(head, layer)
            if f"{prefix}.bias" in tensors:
                assert bias is not None
                assert torch.equal(bias.dense(), tensors[f"{prefix}.bias"])
        lm_head = heads.lm_head(head)
        if f"{head}.{num_layers}.weight" in tensors:
            assert lm_head is not None
            assert torch.equal(lm_head.dense(), tensors[f"{head}.{num_layers}.weight"])


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize(
    "form",
    ["A", "B", "C", "C model prefix", "vllm", "vllm prefix", "tensorrt-llm", "pt", "pt zip", "sharded"],
)
def test_each_format_gives_the_same_heads(form: str, num_layers: int, tmp_path: Path) -> None:
    tensors = heads_a(3, num_layers, lm_head=form != "B")
    base = {
        "model.embed_tokens.weight": torch.zeros(97, 64),
        "model.layers.0.mlp.up_proj.weight": torch.ones(3, 3),
    }
    match form:
        case "A" | "B":
            source = save(tmp_path / "a", tensors)
        case "C":
            merged = {f"medusa_head.{key}": value for key, value in tensors.items()}
            source = save_sharded(tmp_path / "c", {**base, **merged, "lm_head.weight": torch.zeros(97, 64)})
        case "C model prefix":
            source = save_sharded(
                tmp_path / "c", {**base, **{f"model.medusa_head.{k}": v for k, v in tensors.items()}}
            )
        case "vllm":
            source = save(tmp_path / "v", as_vllm(tensors))
        case "vllm prefix":
            source = save(tmp_path / "v", as_vllm(tensors, "medusa_heads."))
        case "tensorrt-llm":
            source = save(tmp_path / "t", as_tensorrt_llm(tensors))
        case "pt" | "pt zip":
            source = tmp_path / "medusa_lm_head.pt"
            torch.save(tensors, source, _use_new_zipfile_serialization=form == "pt zip")
        case _:
            source = save_sharded(tmp_path / "s", tensors, 3)
    assert_same(load_heads(source), tensors, 3, num_layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_values_keep_their_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = heads_a(1, dtype=dtype)
    heads = load_heads(save(tmp_path, tensors))
    assert heads.resblock_weight(0, 0).dense().dtype == dtype
    assert_same(heads, tensors, 1, 1)


def test_the_tensors_decide_and_the_config_is_only_warned_about(tmp_path: Path) -> None:
    config = {"medusa_num_heads": 2, "medusa_num_layers": 3, "hidden_size": 4096, "medusa_fc_bias": False}
    heads = load_heads(save(tmp_path, heads_a(5), config))
    assert heads.num_heads == 5
    assert heads.has_bias
    text = "\n".join(heads.warnings)
    for word in ("medusa_num_heads is 2, the tensors say 5", "medusa_num_layers is 3", "hidden_size is 4096"):
        assert word in text
    assert "medusa_fc_bias is false, but the tensors have biases; keeping them" in text


def test_aliased_layers_are_accepted_and_said(tmp_path: Path) -> None:
    tensors = heads_a(2, 1)
    for head in range(2):
        tensors[f"{head}.2.weight"] = tensors.pop(f"{head}.1.weight")
        for part in ("weight", "bias"):
            tensors[f"{head}.1.linear.{part}"] = tensors[f"{head}.0.linear.{part}"]
    torch.save(tensors, tmp_path / "aliased.pt")
    copied = save(tmp_path / "copied", {key: value.clone() for key, value in tensors.items()})
    for source in (tmp_path / "aliased.pt", copied):
        heads = load_heads(source)
        assert heads.num_layers == 2
        assert "one and the same tensor" in heads.warnings[0]


def test_non_contiguous_and_shared_tensors(tmp_path: Path) -> None:
    whole = torch.randn(128, 64).half()
    tensors = heads_a(2, vocab=64)
    tensors["0.0.linear.weight"] = whole[:64].t()
    tensors["1.0.linear.weight"] = whole[64:]
    tensors["1.1.weight"] = tensors["0.1.weight"]
    file = tmp_path / "medusa_lm_head.pt"
    torch.save(tensors, file)
    assert_same(load_heads(file), tensors, 2, 1)


def test_a_token_map_is_read(tmp_path: Path) -> None:
    tensors = as_vllm(heads_a(2, vocab=32))
    tensors["token_map"] = torch.arange(0, 96, 3, dtype=torch.int64)
    heads = load_heads(save(tmp_path, tensors, {"vocab_size": 97, "truncated_vocab_size": 32}))
    token_map = heads.token_map()
    assert token_map is not None
    assert token_map.dense().tolist() == list(range(0, 96, 3))


def test_unicode_and_spaces_in_paths(tmp_path: Path) -> None:
    source = save(tmp_path / "my heads é 漢", heads_a())
    assert load_heads(source).num_heads == 2


def test_shape_queries_read_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save(tmp_path, heads_a())
    from medusa_quant.checkpoints.store import StoredTensor

    def fail(self: StoredTensor) -> None:
        raise AssertionError(f"{self.key} was read")

    monkeypatch.setattr(StoredTensor, "load", fail)
    assert load_heads(source).hidden_size == 64


def test_a_repo_id_is_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    source = save(tmp_path / "snapshot", heads_a(), {"medusa_num_heads": 2})
    asked: dict[str, object] = {}

    def snapshot_download(repo: str, **options: object) -> str:
        asked.update(repo=repo, **options)
        return str(source)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert load_heads("org/medusa-heads@v1").num_heads == 2
    assert (asked["repo"], asked["revision"]) == ("org/medusa-heads", "v1")


def test_stale_generation_files_do_not_matter(tmp_path: Path) -> None:
    source = save(tmp_path, heads_a())
    (source / "generation_config.json").write_text("not json")
    (source / "config.json").write_text(json.dumps({"vocab_size": 97}))
    assert load_heads(source).warnings == []
