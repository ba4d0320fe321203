"""What the OpenAI API takes and gives, as far as this server has it; the rest is refused by name."""

from __future__ import annotations

import secrets
import time
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from ..runtime.engine import Output
from ..runtime.request import SamplingParams


class _Body(BaseModel):
    """Fields of both endpoints. Those with one allowed value are there because clients send them."""

    model_config = ConfigDict(extra="forbid")

    model: StrictStr
    max_tokens: StrictInt | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0.0, le=100.0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: StrictInt = Field(0, ge=0)
    seed: StrictInt | None = None
    stop: StrictStr | list[StrictStr] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Literal[1] = 1
    ignore_eos: bool = False
    user: str | None = None
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0
    logit_bias: None = None

    def sampling(self, max_tokens: int) -> SamplingParams:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        # As elsewhere, draws differ from call to call unless seeded.
        seed = secrets.randbelow(2**31) if self.seed is None else self.seed
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=seed,
            stop=tuple(stop),
            ignore_eos=self.ignore_eos,
        )


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class CompletionBody(_Body):
    prompt: StrictStr | list[StrictInt] | list[StrictStr] | list[list[StrictInt]]
    echo: Literal[False] = False
    best_of: Literal[1] | None = None
    logprobs: None = None
    suffix: None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry a text."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and all(isinstance(token, int) for token in self.prompt):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


class TextPart(BaseModel):
    type: Literal["text"]
    text: StrictStr


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: StrictStr
    content: StrictStr | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class ChatBody(_Body):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: StrictInt | None = Field(None, ge=1)
    logprobs: Literal[False] | None = None
    tools: None = None
    response_format: TextFormat | None = None


class TextFormat(BaseModel):
    type: Literal["text"]


_Body.model_rebuild()
CompletionBody.model_rebuild()
ChatBody.model_rebuild()


def usage(outputs: list[Output]) -> dict[str, int]:
    prompt = sum(output.prompt_tokens for output in outputs)
    written = sum(len(output.token_ids) for output in outputs)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


class Reply:
    """Builds the objects of one answer. chat: of the chat endpoint, else of completions."""

    def __init__(self, model: str, chat: bool) -> None:
        self._chat = chat
        self._common: dict[str, Any] = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        choices = [self._choice(number, output) for number, output in enumerate(outputs)]
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._common, "object": kind, "choices": choices, "usage": usage(outputs)}

    def chunk(self, text: str | None, reason: str | None = None, first: bool = False) -> dict[str, Any]:
        """A piece of a stream; text None: the last one, with its reason."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        if self._chat:
            choice["delta"] = {} if text is None else {"content": text}
            if first:
                choice["delta"]["role"] = "assistant"
        else:
            choice["text"] = text or ""
        return {**self._common, "object": self._piece, "choices": [choice]}

    def usage_chunk(self, output: Output) -> dict[str, Any]:
        return {**self._common, "object": self._piece, "choices": [], "usage": usage([output])}

    @property
    def _piece(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _choice(self, number: int, output: Output) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": number,
            "finish_reason": finish_reason(output),
            "logprobs": None,
        }
        if self._chat:
            choice["message"] = {"role": "assistant", "content": output.text}
        else:
            choice["text"] = output.text
        return choice


def finish_reason(output: Output) -> str:
    """The API knows `stop` and `length`; a deadline ends a text by its length."""
    return "stop" if output.finish_reason == "stop" else "length"
