"""The errors a user can cause or meet, each mapped to an exit code of the command line."""

from __future__ import annotations

from os import PathLike


class MedusaQuantError(Exception):
    """Base of every error this package raises on purpose; printed as one line, without traceback."""

    exit_code = 2


class InputError(MedusaQuantError):
    """Bad input. The message says where (file, key), what was expected and found, and what to do."""

    def __init__(
        self,
        what: str,
        *,
        file: str | PathLike[str] | None = None,
        key: str | None = None,
        expected: object = None,
        found: object = None,
        fix: str | None = None,
    ) -> None:
        where = ": ".join(str(part) for part in (file, key) if part is not None)
        detail = ", ".join(
            f"{label} {value}"
            for label, value in (("expected", expected), ("found", found))
            if value is not None
        )
        message = f"{where}: {what}" if where else what
        if detail:
            message += f" ({detail})"
        if fix:
            message += f"; {fix}"
        super().__init__(message)
        self.file, self.key, self.expected, self.found, self.fix = file, key, expected, found, fix


class VerifyError(MedusaQuantError):
    """A converted folder does not hold what its manifest, or its source, says."""

    exit_code = 1


class GateError(MedusaQuantError):
    """A quality gate asked for by the user (agreement, acceptance) was not met."""

    exit_code = 3
