"""Before anything is timed: the heads in every dtype, statistics to judge them by, and their quality."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ..calibration import Statistics, held_out
from ..calibration.calibrated import convert_calibrated, judge, shared_lm_matrix
from ..calibration.collect import CollectOptions, base_identity, collect
from ..calibration.prompts import CALIBRATION_PROMPTS, read_prompts
from ..checkpoints import MedusaHeads, load_heads
from ..conversion import convert
from ..errors import MedusaQuantError
from ..plan import ConvertOptions
from ..runtime.heads import DraftHeads
from ..runtime.model import LlamaModel, load_base
from .results import VariantResult
from .settings import Settings, Variant

# Held-out states each variant is judged on; logits over the whole vocabulary are what takes time.
_JUDGED_STATES = 1024
_COLLECTED_TOKENS = 128


def statistics_for(settings: Settings, tokenizer: Any, given: str | None, out: Path) -> Path:
    """The statistics file to calibrate and judge with: the user's, or one collected over shipped prompts."""
    if given is not None:
        return Path(given)
    file = out / "calibration.safetensors"
    if not file.exists():
        # Collected in the base's own precision: what heads were trained on.
        model = load_base(settings.base, "fp32", activation="exact")
        options = CollectOptions(max_new_tokens=_COLLECTED_TOKENS, batch_size=32)
        identity = base_identity(settings.base, model, "fp32")
        prompts = read_prompts(CALIBRATION_PROMPTS)
        partial = file.with_name(file.name + ".partial")
        collected = collect(model, tokenizer, prompts, options, partial, identity)
        collected.statistics.save(file)
        partial.unlink(missing_ok=True)
    return file


def converted(settings: Settings, variant: Variant, statistics: Path, out: Path) -> Path:
    """The folder of the heads in one dtype, converted unless it is there."""
    folder = out / "heads" / variant.name
    if folder.exists():
        return folder
    source = load_heads(settings.heads)
    expand = settings.lm_head == "own" and source.shared_lm_head
    calibrated = variant.method != "rtn"
    options = ConvertOptions(
        dtype=variant.dtype,
        group_size=variant.group_size,
        method=variant.method,
        base=settings.base if expand else None,
        calibration=str(statistics) if calibrated else None,
    )
    if calibrated:
        convert_calibrated(source, folder, options)
    else:
        convert(source, folder, options)
    return folder


def load(folder: Path, base: LlamaModel, activation: str) -> tuple[MedusaHeads, DraftHeads, float]:
    """Heads read and packed for the base, and the seconds it took."""
    started = time.perf_counter()
    heads = load_heads(folder)
    draft = DraftHeads(heads, base, activation)
    return heads, draft, time.perf_counter() - started


def quality(heads: MedusaHeads, source: MedusaHeads, base: str, statistics: Statistics) -> dict[str, Any]:
    """The evaluation on held-out states against the fp16 heads."""
    data = held_out(statistics, heads.num_heads, _JUDGED_STATES)
    return judge(heads, data, source, shared_lm_matrix(heads, base, statistics)).as_dict()


def peak_memory(settings: Settings, folder: Path | None) -> int | None:
    """Peak resident bytes of a process of its own that loads the base and these heads and writes a little;
    None where the system does not tell. Raises MedusaQuantError if it fails."""
    command = [sys.executable, "-m", "medusa_quant", "generate", settings.base, "--prompt", "Hello"]
    command += ["--max-tokens", "8", "--json", "--base-dtype", settings.base_dtype, "--max-len", "256"]
    command += ["--base-activation", settings.base_activation]
    if folder is not None:
        command += ["--heads", str(folder), "--heads-activation", settings.heads_activation]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise MedusaQuantError(f"{folder or settings.base} does not run: {done.stderr.strip()[-400:]}")
    peak: int | None = json.loads(done.stdout)["stats"]["peak_memory_bytes"]
    return peak


def describe(settings: Settings, folder: Path, draft: DraftHeads, seconds: float) -> VariantResult:
    return VariantResult(str(folder), draft.nbytes, seconds, peak_memory(settings, folder), None)
