"""Whatever interrupts a conversion, the old folder stays whole and nothing half-written is left."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import RunCli
from made import heads_a, save

from medusa_quant import ConvertOptions, InputError, convert
from medusa_quant.workspace import atomic, writer
from medusa_quant.workspace.writer import PartWriter


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.fixture
def converted(tmp_path: Path) -> tuple[Path, Path, dict[str, bytes]]:
    """(source, out, content of out) after a first conversion, with a base model's file in the same folder."""
    source, out = save(tmp_path / "s", heads_a(2)), tmp_path / "out"
    convert(source, out, ConvertOptions(dtype="fp16"))
    (out / "triton_models" / "weights" / "tok_embeddings.weight").write_bytes(b"base model")
    return source, out, snapshot(out)


class Stop(BaseException):
    """Stands for an interruption: not an Exception, as KeyboardInterrupt is not."""


STAGES = {
    "start": ("medusa_quant.conversion", "_manifest"),
    "quantizing": ("medusa_quant.conversion", "stage"),
    "writing": ("medusa_quant.workspace.writer", "byte_blocks"),
    "text files": ("medusa_quant.conversion", "config_files"),
    "carrying over": ("medusa_quant.workspace.atomic", "_carry_over"),
    "syncing": ("medusa_quant.workspace.atomic", "_sync_tree"),
    "swapping": ("medusa_quant.workspace.atomic", "_swap"),
}


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("stage", list(STAGES))
def test_interruption_at_every_stage(
    stage: str,
    existing: bool,
    converted: tuple[Path, Path, dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, out, before = converted
    target = out if existing else tmp_path / "fresh" / "deep"

    def stop(*_: object, **__: object) -> None:
        raise Stop

    monkeypatch.setattr(".".join(STAGES[stage]), stop)
    if stage == "carrying over" and not existing:
        pytest.skip("nothing to carry over")
    with pytest.raises(Stop):
        convert(source, target, ConvertOptions(dtype="int8"), force=True)
    assert snapshot(out) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "s"]
    assert sorted(p.name for p in (out / "triton_models").iterdir()) == ["weights"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("layout", ["turbomind", "safetensors"])
def test_a_failing_disk(
    number: int,
    layout: str,
    converted: tuple[Path, Path, dict[str, bytes]],
    run: RunCli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, out, before = converted
    written = 0

    def failing(self: PartWriter, *arguments: object, **options: object) -> object:
        nonlocal written
        written += 1
        if written == 3:
            raise OSError(number, os.strerror(number))
        return original(self, *arguments, **options)  # type: ignore[arg-type]

    original = PartWriter.write
    monkeypatch.setattr(writer.PartWriter, "write", failing)
    target = out if layout == "turbomind" else out.with_name("other")
    result = run("convert", source, "--dtype", "int8", "--layout", layout, "--out", target, "--force")
    assert result.code == 2
    assert os.strerror(number) in result.err
    assert "the old content is untouched" in result.err
    assert snapshot(out) == before
    assert not out.with_name("other").exists()


def test_a_full_disk(converted: tuple[Path, Path, dict[str, bytes]], tmp_path: Path, run: RunCli) -> None:
    """A real one: a tmpfs of 64 KB, where this machine lets us mount it."""
    source, _, _ = converted
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        result = run("convert", source, "--dtype", "fp32", "--out", small / "out")
        assert result.code == 2
        assert os.strerror(errno.ENOSPC) in result.err
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_read_only_target(tmp_path: Path, run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save(tmp_path / "s", heads_a())
    parent = tmp_path / "locked"
    parent.mkdir()
    parent.chmod(0o555)
    if os.access(parent, os.W_OK):  # root may write anywhere

        def refuse(*_: object, **__: object) -> str:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        monkeypatch.setattr(atomic.tempfile, "mkdtemp", refuse)
    result = run("convert", source, "--dtype", "fp16", "--layout", "safetensors", "--out", parent / "out")
    assert result.code == 2
    assert os.strerror(errno.EACCES) in result.err
    assert list(parent.iterdir()) == []


def test_target_exists(converted: tuple[Path, Path, dict[str, bytes]], run: RunCli, tmp_path: Path) -> None:
    source, out, before = converted
    result = run("convert", source, "--dtype", "int8", "--out", out)
    assert result.code == 2
    assert "pass --force to replace it" in result.err
    assert snapshot(out) == before
    assert run("convert", source, "--dtype", "int8", "--out", out, "--force").code == 0
    names = {file.name for file in (out / "triton_models" / "weights").iterdir()}
    assert "medusa.0.0.linear.0.qweight" in names
    assert "medusa.0.0.linear.0.weight" not in names
    assert "tok_embeddings.weight" in names
    assert run("verify", out).code == 0
    (tmp_path / "a file").write_text("x")
    assert (
        "Not a directory"
        in run("convert", source, "--dtype", "int8", "--out", tmp_path / "a file", "--force").err
    )


def test_a_foreign_file_of_our_name_is_not_replaced(tmp_path: Path, run: RunCli) -> None:
    source, out = save(tmp_path / "s", heads_a()), tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    result = run("convert", source, "--dtype", "fp16", "--layout", "hf", "--out", out, "--force")
    assert result.code == 2
    assert "config.json here was not written by this tool" in result.err
    assert (out / "config.json").read_text() == "{}"


def test_converting_a_folder_onto_itself(converted: tuple[Path, Path, dict[str, bytes]], run: RunCli) -> None:
    _, out, _ = converted
    assert run("convert", out, "--dtype", "int8", "--tp", "2", "--out", out, "--force").code == 0
    assert run("verify", out).code == 0


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_removes_what_was_begun(sent: int, tmp_path: Path) -> None:
    source = save(tmp_path / "s", heads_a(4, hidden=512, vocab=8192))
    command = [sys.executable, "-m", "medusa_quant", "convert", source, "--dtype", "int4", "--method", "mse"]
    process = subprocess.Popen(
        [*map(str, command), "--out", str(tmp_path / "out")],
        stderr=subprocess.PIPE,
        # Where the tests themselves run in the background SIGINT is ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(sent, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        begun = list((tmp_path / "out").rglob("*.qweight")) if (tmp_path / "out").exists() else []
        if begun:
            break
        time.sleep(0.02)
    assert process.poll() is None, "the conversion ended before it could be interrupted"
    process.send_signal(sent)
    assert process.wait(60) == 130
    assert not (tmp_path / "out").exists()


def test_the_folder_mode_follows_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        convert(save(tmp_path / "s", heads_a()), tmp_path / "out", ConvertOptions(dtype="fp16"))
    finally:
        os.umask(old)
    assert (tmp_path / "out" / "triton_models" / "weights").stat().st_mode & 0o777 == 0o750


def test_a_file_system_without_exchange(
    converted: tuple[Path, Path, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out, _ = converted
    monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    convert(source, out, ConvertOptions(dtype="int8"), force=True)
    assert sorted(p.name for p in (out / "triton_models").iterdir()) == ["weights"]
    assert (out / "triton_models" / "weights" / "tok_embeddings.weight").read_bytes() == b"base model"


def test_finish_can_refuse(converted: tuple[Path, Path, dict[str, bytes]]) -> None:
    source, out, before = converted

    def refuse(folder: Path, _: object) -> None:
        assert (folder / "manifest.json").is_file()
        raise InputError("not good enough")

    with pytest.raises(InputError, match="not good enough"):
        convert(source, out, ConvertOptions(dtype="int8"), force=True, finish=refuse)
    assert snapshot(out) == before
