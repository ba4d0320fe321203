"""Timing kernels on cold weights, and the bandwidth their floors come from."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import torch

from . import dispatch
from .cpu.pages import on_huge_pages

_FALLBACK_CACHE = 64 << 20
_BUFFER = 512 << 20


def last_level_cache() -> int:
    """Bytes of the largest CPU cache, or 64 MiB where the system does not tell."""
    sizes = [
        int(path.read_text().strip().rstrip("K")) << 10
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        if path.read_text().strip().endswith("K")
    ]
    return max(sizes, default=_FALLBACK_CACHE)


def copies_for(nbytes: int, device: torch.device) -> int:
    """How many copies of a weight to rotate so that each is cold again when its turn comes."""
    cache = last_level_cache() if device.type == "cpu" else 256 << 20
    return max(2, -(-2 * cache // max(1, nbytes)) + 1)


def read_bandwidth(device: torch.device, passes: int = 9) -> float:
    """Bytes per second of streaming reads now: the median of several passes over a buffer no cache holds."""
    data = _buffer(device)
    if device.type == "cpu" and dispatch.unavailable("cpu") is None:
        from .cpu.library import library

        result = ctypes.c_uint64()

        def read() -> None:
            library().mq_read(data.data_ptr(), _BUFFER, ctypes.addressof(result), torch.get_num_threads())
    else:
        words = data.view(torch.int64)

        def read() -> None:
            words.sum()

    return _BUFFER / statistics.median(_time_calls([read], device, passes))


@lru_cache(maxsize=1)
def _buffer(device: torch.device) -> torch.Tensor:
    data = torch.ones(_BUFFER, dtype=torch.uint8, device=device)
    return on_huge_pages(data) if device.type == "cpu" else data


def median_time(calls: Sequence[Callable[[], object]], device: torch.device, budget: float = 0.6) -> float:
    """Median seconds of calls taken in turn, as many as fit `budget` seconds, at least 5 and at most 200.

    calls: the same work on different copies of the weight, so that none finds its copy in a cache.
    """
    if device.type == "cuda":
        calls = [_captured(call) for call in calls]
    first = _time_calls(calls[:2], device, 2)
    count = max(5, min(200, int(budget / max(1e-6, min(first)))))
    return statistics.median(_time_calls(calls, device, count))


def _time_calls(calls: Sequence[Callable[[], object]], device: torch.device, count: int) -> list[float]:
    if device.type != "cuda":
        times = []
        for index in range(count):
            call = calls[index % len(calls)]
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return times
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)
    ]
    for index, (start_event, end_event) in enumerate(events):
        start_event.record()
        calls[index % len(calls)]()
        end_event.record()
    torch.cuda.synchronize()
    return [start_event.elapsed_time(end_event) / 1e3 for start_event, end_event in events]


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph: launch overhead is not what is measured."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
