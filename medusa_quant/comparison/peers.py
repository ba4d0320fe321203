"""Other programs on the same prompts, each in a process of its own, where they are installed."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

import torch

from ..errors import InputError
from .results import PeerRun
from .settings import Settings

PEERS = ("llama.cpp", "transformers", "vllm")
_PROGRAM = Path(__file__).with_name("peer.py")
_TIMEOUT = 1800


def check_peers(names: list[str]) -> None:
    """Raise InputError for a peer that is not known."""
    for name in names:
        if name not in PEERS:
            raise InputError("unknown peer", expected=" | ".join(PEERS), found=name)


def run_peer(name: str, python: str, settings: Settings, batch: int, repeat: int) -> PeerRun:
    """Run the prompts in a peer; what it cannot do is said in `error`.

    python: the interpreter that has the peer installed, which may be another environment's.
    """
    task = {
        "base": str(Path(settings.base).expanduser()),
        "prompts": settings.prompts,
        "tokens": settings.tokens,
        "batch": batch,
        "threads": torch.get_num_threads(),
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(task, file)
        file.flush()
        try:
            # -I: the folder of the program must not shadow what the peer imports.
            done = subprocess.run(
                [python, "-I", str(_PROGRAM), name, file.name],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return PeerRun(name, batch, repeat, "", error=str(error))
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it ended without a word"]
        return PeerRun(name, batch, repeat, "", error=lines[-1])
    found = json.loads(done.stdout.splitlines()[-1])
    return PeerRun(name, batch, repeat, found["version"], found["tokens"], found["seconds"])
