"""Convert a synthetic 33B-shaped checkpoint and compare with reading and writing the same bytes.

Floor: every source byte is read and every output byte written (and synced) once; both are measured in
the same run, each dtype's conversion in a process of its own so that its peak RSS is its own.

    python benchmarks/convert_33b.py [--dir DIR] [--dtypes fp16,int8,int4] [--tp 4] [--shape 33b|7b|tiny]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHAPES = {"33b": (5, 6656, 32000), "13b": (5, 5120, 32000), "7b": (5, 4096, 32000), "tiny": (2, 256, 1000)}
REPEATS = 3


def make_checkpoint(folder: Path, heads: int, hidden: int, vocab: int) -> None:
    import torch
    from safetensors.torch import save_file

    # One shard a head keeps the making of it small too.
    generator = torch.Generator().manual_seed(0)
    weight_map = {}
    folder.mkdir(parents=True)
    for head in range(heads):
        tensors = {
            f"{head}.0.linear.weight": torch.randn(hidden, hidden, generator=generator).mul_(0.02).half(),
            f"{head}.0.linear.bias": torch.randn(hidden, generator=generator).mul_(0.02).half(),
            f"{head}.1.weight": torch.randn(vocab, hidden, generator=generator).mul_(0.02).half(),
        }
        name = f"heads-{head}.safetensors"
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "heads.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def read_and_write(source: Path, out: Path, written: int) -> float:
    """Seconds to read every source byte and write `written` bytes, synced."""
    block = memoryview(bytearray(8 << 20))
    start = time.perf_counter()
    for file in sorted(source.glob("*.safetensors")):
        with open(file, "rb") as handle:
            while handle.readinto(block):
                pass
    with open(out, "wb") as handle:
        left = written
        while left > 0:
            left -= handle.write(block[: min(left, len(block))])
        handle.flush()
        os.fsync(handle.fileno())
    seconds = time.perf_counter() - start
    out.unlink()
    return seconds


def convert_once(source: str, out: str, dtype: str, tp: int, method: str) -> None:
    """Run in a child process: prints seconds, bytes written and peak RSS in MB."""
    from medusa_quant import ConvertOptions, convert

    start = time.perf_counter()
    result = convert(source, out, ConvertOptions(dtype=dtype, tp=tp, method=method), force=True)
    seconds = time.perf_counter() - start
    written = sum(entry.bytes for entry in result.manifest.files)
    print(json.dumps({"seconds": seconds, "bytes": written, "peak_rss_mb": peak_rss_mb()}))


def peak_rss_mb() -> float:
    """Of this process image; getrusage would report the parent's peak, which a child inherits."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, help="where to put 2.6 GB of input and as much output")
    parser.add_argument("--dtypes", default="fp16,int8,int4")
    parser.add_argument("--method", default="rtn")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--shape", choices=SHAPES, default="33b")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        source, out, dtype, tp, method = args.child
        convert_once(source, out, dtype, int(tp), method)
        return
    work = Path(tempfile.mkdtemp(prefix="medusa-quant-bench-", dir=args.dir))
    try:
        source = work / "source"
        make_checkpoint(source, *SHAPES[args.shape])
        rows = []
        for dtype in args.dtypes.split(","):
            child = [
                sys.executable,
                __file__,
                "--child",
                source,
                work / "out",
                dtype,
                str(args.tp),
                args.method,
            ]
            runs, floors = [], []
            for _ in range(REPEATS):
                run = json.loads(subprocess.run(child, check=True, capture_output=True, text=True).stdout)
                runs.append(run)
                floors.append(read_and_write(source, work / "floor", run["bytes"]))
            seconds = statistics.median(run["seconds"] for run in runs)
            floor = statistics.median(floors)
            rows.append(
                {
                    "dtype": dtype,
                    "method": args.method,
                    "tp": args.tp,
                    "bytes": runs[0]["bytes"],
                    "seconds": round(seconds, 2),
                    "read_write_seconds": round(floor, 2),
                    "ratio": round(seconds / floor, 2),
                    "peak_rss_mb": round(max(run["peak_rss_mb"] for run in runs)),
                }
            )
            if not args.json:
                print(rows[-1], flush=True)
        if args.json:
            print(json.dumps(rows, indent=2))
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
