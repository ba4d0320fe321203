"""`config.ini`: the `[llama]` keys a TurboMind-style loader reads, other sections and keys kept."""

from __future__ import annotations

import configparser
import io
from pathlib import Path

from ..errors import InputError

SECTION = "llama"


def update_config_ini(existing: Path | None, values: dict[str, object]) -> str:
    """Text of a config.ini with `values` set in `[llama]`. existing: the old file, or None.

    Raises InputError if the old file is not an INI file.
    """
    # No interpolation and case kept: other tools' values and keys must come through untouched.
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    if existing is not None:
        try:
            parser.read_string(existing.read_text(encoding="utf-8"), source=str(existing))
        except (configparser.Error, UnicodeDecodeError) as error:
            raise InputError(f"not an INI file: {str(error).splitlines()[0]}", file=existing) from error
    if not parser.has_section(SECTION):
        parser.add_section(SECTION)
    for key, value in values.items():
        parser.set(SECTION, key, str(value))
    text = io.StringIO()
    parser.write(text)
    return text.getvalue()
