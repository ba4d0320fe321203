"""The SmolLM2 GGUF: tensors, configuration and tokenizer as transformers reads them from the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_quant.runtime.model import Segment, load_base, load_tokenizer
from medusa_quant.runtime.model.loader import open_base

PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate", reason="transformers reads GGUF only with accelerate installed")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(smollm2.parent), gguf_file=smollm2.name, dtype=torch.float32
    ).eval()


def test_fp32_logits_equal_transformers(smollm2: Path, reference: Any) -> None:
    model = load_base(smollm2.parent)
    hidden = model.forward(
        torch.tensor(PROMPT),
        torch.arange(len(PROMPT)),
        [Segment(0, 0, len(PROMPT))],
        model.new_cache(1, 32),
    )
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(model.logits(hidden), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(model.logits(hidden).argmax(-1), expected.argmax(-1))


def test_configuration(smollm2: Path, reference: Any) -> None:
    config, _ = open_base(smollm2)
    expected = reference.config
    for name in ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings", "head_dim"):
        assert getattr(config, name) == getattr(expected, name)
    assert config.rope.theta == expected.rope_parameters["rope_theta"]
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)


def test_tokenizer_has_the_chat_template(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.decode(ids).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
