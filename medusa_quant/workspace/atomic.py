"""Replacing a folder in one step: an interrupted or full-disk run leaves the old one whole."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import InputError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def occupied(target: Path) -> bool:
    """Whether the target exists and holds anything. Raises InputError if it is a file."""
    if target.exists() and not target.is_dir():
        raise InputError("the target is a file", file=target, fix="choose another --out")
    return target.is_dir() and any(target.iterdir())


@contextmanager
def replaced_folder(target: Path, is_owned: Callable[[str], bool]) -> Iterator[Path]:
    """A temporary sibling to write into; on success it takes the target's place atomically.

    Files of the old folder that are not owned, and were not written anew, are carried over as hard
    links: the same inodes, never opened. On any exception the sibling is removed and the old folder is
    as it was. Raises InputError if the place cannot be written.
    """
    target = Path(os.path.realpath(target))
    made = _make_parents(target)
    try:
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-", dir=target.parent))
    except OSError as error:
        _remove_parents(made)
        raise InputError(f"cannot write here: {error.strerror}", file=target.parent) from error
    try:
        # mkdtemp makes 0700; the result must be as readable as any folder the user makes.
        umask = os.umask(0)
        os.umask(umask)
        staging.chmod(target.stat().st_mode & 0o7777 if target.exists() else 0o777 & ~umask)
        yield staging
        if target.exists():
            _carry_over(target, staging, is_owned)
        _sync_tree(staging)
        _swap(staging, target)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        _remove_parents(made)
        if isinstance(error, OSError) and not isinstance(error, InputError):
            raise InputError(
                f"could not write: {error.strerror or error}; the old content is untouched", file=target
            ) from error
        raise
    shutil.rmtree(staging, ignore_errors=True)
    _sync_folder(target.parent)


def _make_parents(target: Path) -> list[Path]:
    missing = [parent for parent in [*reversed(target.parents)] if not parent.exists()]
    made: list[Path] = []
    try:
        for parent in missing:
            parent.mkdir(exist_ok=True)
            made.append(parent)
    except OSError as error:
        _remove_parents(made)
        raise InputError(f"cannot make the folder: {error.strerror}", file=target.parent) from error
    return made


def _remove_parents(made: list[Path]) -> None:
    for parent in reversed(made):
        try:
            parent.rmdir()
        except OSError:
            return


def _carry_over(old: Path, new: Path, is_owned: Callable[[str], bool]) -> None:
    for entry in os.scandir(old):
        if is_owned(entry.name) or os.path.lexists(new / entry.name):
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.copytree(entry.path, new / entry.name, symlinks=True, copy_function=_link)
        else:
            _link(entry.path, new / entry.name)


def _link(source: str | os.PathLike[str], destination: str | os.PathLike[str]) -> None:
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError as error:
        # Some network and removable file systems have no hard links.
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EOPNOTSUPP):
            raise
        shutil.copy2(source, destination, follow_symlinks=False)


def _swap(staging: Path, target: Path) -> None:
    """Put staging in target's place; afterwards staging holds the old folder, or is gone."""
    if not target.exists():
        os.rename(staging, target)
        return
    if _exchange(staging, target):
        return
    # Without an atomic exchange two renames must do; the first is undone if the second fails.
    parked = staging.with_name(staging.name + ".old")
    os.rename(target, parked)
    try:
        os.rename(staging, target)
    except BaseException:
        os.rename(parked, target)
        raise
    os.rename(parked, staging)


def _exchange(first: Path, second: Path) -> bool:
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0


def _sync_tree(folder: Path) -> None:
    for path, _, _ in os.walk(folder):
        _sync_folder(Path(path))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
