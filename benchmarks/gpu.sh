#!/usr/bin/env bash
# The whole GPU set: correctness, then timings, in under 8 minutes. Needs one CUDA or ROCm device.
#   benchmarks/gpu.sh [--output FILE]     write the timing table (default docs/gpu-timings.md)
#   benchmarks/gpu.sh --dry-run [--output FILE]   no device: imports, arguments, all kernels compiled
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { sed -n '2,4s/^# *//p' "$0"; }

dry_run=false
output=""
while [ $# -gt 0 ]; do
    case "$1" in
        --dry-run) dry_run=true ;;
        --output)
            [ $# -ge 2 ] || { echo "gpu.sh: --output needs a file" >&2; exit 2; }
            output=$2
            shift
            ;;
        -h | --help) usage; exit 0 ;;
        *) echo "gpu.sh: unknown argument $1" >&2; usage >&2; exit 2 ;;
    esac
    shift
done
python=${PYTHON:-python}

if $dry_run; then
    "$python" benchmarks/gpu_loop.py --device cpu
    exec "$python" benchmarks/gpu_dry_run.py --output "${output:-docs/gpu-compiled.md}"
fi
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu.sh: no CUDA or ROCm device; use --dry-run" >&2
    exit 2
fi
timeout 160 "$python" benchmarks/gpu_check.py
timeout 60 "$python" benchmarks/gpu_loop.py
timeout 250 "$python" benchmarks/gpu_bench.py --seconds 200 --output "${output:-docs/gpu-timings.md}"
