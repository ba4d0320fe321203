"""Prompt files: plain text (one prompt a line) or JSON lines with `prompt`, `text` or `messages`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import InputError

_ASSETS = Path(str(files("medusa_quant"))) / "assets"
# Shipped with the package: one file to calibrate with, another to measure with.
CALIBRATION_PROMPTS = _ASSETS / "calibration_prompts.txt"
PROMPTS = _ASSETS / "prompts.txt"

Messages = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Prompt:
    """A conversation to continue: (role, content) pairs, the last one usually the user's."""

    messages: Messages


def read_prompts(source: str | Path) -> list[Prompt]:
    """Read a `.txt` or `.jsonl` file, or standard input for `-` (JSON lines if it begins with an object).

    Raises InputError naming file and line for what is no prompt, and for a file without any.
    """
    text, name = _read(source)
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise InputError("no prompts: the file is empty", file=name, fix="give one prompt a line")
    if Path(name).suffix in (".jsonl", ".json") or (Path(name).suffix != ".txt" and lines[0][1][0] == "{"):
        return [_from_json(line, f"{name}:{number}") for number, line in lines]
    return [Prompt((("user", line),)) for _, line in lines]


def _read(source: str | Path) -> tuple[str, str]:
    if str(source) == "-":
        return sys.stdin.read(), "standard input"
    path = Path(source).expanduser()
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except OSError as error:
        raise InputError(f"cannot read prompts: {error.strerror}", file=path) from error
    except UnicodeDecodeError as error:
        raise InputError("prompts must be UTF-8 text", file=path) from error


def _from_json(line: str, where: str) -> Prompt:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise InputError(f"not valid JSON: {error}", file=where) from error
    if not isinstance(content, dict):
        raise InputError("not a JSON object", file=where, found=type(content).__name__)
    if "messages" in content:
        return Prompt(_messages(content["messages"], where))
    text = content.get("prompt", content.get("text"))
    if not isinstance(text, str) or not text.strip():
        raise InputError(
            "no prompt in this line",
            file=where,
            expected="a non-empty `prompt`, `text` or `messages`",
            found=", ".join(content) or "no keys",
        )
    return Prompt((("user", text),))


def _messages(value: Any, where: str) -> Messages:
    valid = isinstance(value, list) and value
    if not valid or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in value
    ):
        raise InputError("bad `messages`", file=where, expected="a list of {role, content} strings")
    return tuple((message["role"], message["content"]) for message in value)
