"""Text from tokens as they come: whole characters only, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Tokens before the new ones that are decoded with them, as some tokenizers join neighbours.
_CONTEXT = 5


class Detokenizer:
    """Incremental decoding of one request's tokens.

    text: what is final. A tail that may still change (half a character, the beginning of a stop string)
    is held back until it is settled or `flush` is called. stopped: a stop string has come.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens: list[int] = []
        self._read = 0  # tokens whose text is in _seen
        self._seen = ""
        self.text, self.stopped = "", False

    def add(self, token: int) -> str:
        """Take in one token; returns the text it settled."""
        self._tokens.append(token)
        begin = max(0, self._read - _CONTEXT)
        before = self._decode(self._tokens[begin : self._read])
        after = self._decode(self._tokens[begin:])
        if after.endswith("�"):
            return ""
        self._read = len(self._tokens)
        self._seen += after[len(before) :]
        return self._settle()

    def flush(self) -> str:
        """The text held back, once no token can follow."""
        begin = max(0, self._read - _CONTEXT)
        before = self._decode(self._tokens[begin : self._read])
        self._seen += self._decode(self._tokens[begin:])[len(before) :]
        self._read = len(self._tokens)
        new = self._settle()
        if not self.stopped:
            new += self._seen[len(self.text) :]
            self.text = self._seen
        return new

    def _settle(self) -> str:
        found = [at for stop in self._stop if (at := self._seen.find(stop)) >= 0]
        if found:
            self.stopped = True
            final = self._seen[: min(found)]
        else:
            final = self._seen[: len(self._seen) - self._held_back()]
        new, self.text = final[len(self.text) :], final
        return new

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._seen)), 0, -1):
                if self._seen.endswith(stop[:size]):
                    longest = max(longest, size)
                    break
        return longest

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)) if tokens else ""
