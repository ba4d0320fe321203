"""Conversations as token ids: one rule for calibration, training, generation and serving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import InputError


def encode_chat(tokenizer: Any, messages: Sequence[dict[str, Any]], answer: bool = True) -> list[int]:
    """Token ids of a conversation in the tokenizer's chat template; without one, of the joined contents.

    messages: dicts with `role` and `content`. answer: up to where the model answers. Raises InputError for
    messages the template refuses.
    """
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer("\n".join(message["content"] for message in messages))["input_ids"])
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answer)
    except Exception as error:  # templates raise whatever they like, to refuse a role order
        raise InputError(f"the chat template refuses these messages: {error}") from error
    # The template has written the special tokens already.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
