"""The small text files beside the weights of each layout, as its readers expect them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .config_ini import update_config_ini
from .layouts import Layout
from .manifest import Manifest
from .naming import CONFIG_INI

CONFIG_JSON, QUANTIZE_CONFIG_JSON = "config.json", "quantize_config.json"

_NAMES = {
    "turbomind": (CONFIG_INI,),
    "safetensors": (),
    "hf": (CONFIG_JSON,),
    "vllm": (CONFIG_JSON,),
    "gptq": (CONFIG_JSON, QUANTIZE_CONFIG_JSON),
}


def config_files(layout: Layout, manifest: Manifest | None, old_config_ini: Path | None) -> dict[str, str]:
    """Text by file name; without a manifest only the names, with empty texts.

    old_config_ini: an existing file whose other keys are kept. Raises InputError if it cannot be parsed.
    """
    names = _NAMES[layout.name]
    if manifest is None:
        return dict.fromkeys(names, "")
    makers = {
        CONFIG_INI: lambda: _config_ini(manifest, old_config_ini),
        CONFIG_JSON: lambda: _json(
            _vllm_config(manifest) if layout.name == "vllm" else _medusa_config(manifest)
        ),
        QUANTIZE_CONFIG_JSON: lambda: _json(_quantize_config(manifest)),
    }
    return {name: makers[name]() for name in names}


def _config_ini(manifest: Manifest, old: Path | None) -> str:
    values: dict[str, object] = {
        "medusa_num_heads": manifest.num_heads,
        "medusa_num_layers": manifest.num_layers,
        "medusa_weight_type": manifest.weight_type,
        "medusa_group_size": 0 if manifest.group_size is None else manifest.group_size,
    }
    return update_config_ini(old if old is not None and old.is_file() else None, values)


def _medusa_config(manifest: Manifest) -> dict[str, Any]:
    config: dict[str, Any] = {
        "medusa_num_heads": manifest.num_heads,
        "medusa_num_layers": manifest.num_layers,
        "hidden_size": manifest.hidden_size,
    }
    if manifest.vocab_size is not None:
        config["vocab_size"] = manifest.vocab_size
    if manifest.lm_head == "shared":
        config["version"] = "2"
    return config


def _vllm_config(manifest: Manifest) -> dict[str, Any]:
    roles = {entry.role for entry in manifest.files}
    truncated = next((e.tensor_shape[0] for e in manifest.files if e.role == "lm_head.weight"), None)
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": manifest.hidden_size,
        "vocab_size": manifest.vocab_size,
        "truncated_vocab_size": truncated,
        "num_heads": manifest.num_heads,
        "num_hidden_layers": manifest.num_layers,
        "medusa_fc_bias": "resblock.bias" in roles,
    }


def _quantize_config(manifest: Manifest) -> dict[str, Any]:
    bits = int(manifest.weight_type.removeprefix("int"))
    return {
        "bits": bits,
        "group_size": manifest.group_size,
        "damp_percent": 0.01,
        "desc_act": bool(manifest.options["act_order"]),
        "static_groups": False,
        "sym": bool(manifest.options["symmetric"]),
        "true_sequential": True,
        "model_name_or_path": None,
        "model_file_base_name": "model",
        "is_marlin_format": False,
        "quant_method": "gptq",
        "checkpoint_format": manifest.options["gptq_format"],
    }


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"
