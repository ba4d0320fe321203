"""A tokenizer for the tiny bases of `tiny_models`: one token a letter, no chat template."""

from __future__ import annotations

from pathlib import Path

from tiny_models import TINY


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer files beside a tiny model, so that commands can load it from the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: TINY["vocab_size"] - 3]
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    fast.save_pretrained(folder)
