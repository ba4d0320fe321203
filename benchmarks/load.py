"""A bounded load on `medusa-quant serve` over loopback, with the real openai client.

python benchmarks/load.py BASE [--heads HEADS] [--base-dtype int8] [--streams 64] [--rate 4] [--requests 2000]

Streams arrive as a Poisson process and a third is cancelled half-way; then short requests run for memory.
Fails where an answer is lost, differs from the offline text, or a slot stays taken.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from openai import AsyncOpenAI

from medusa_quant import Engine, SamplingParams
from medusa_quant.calibration.prompts import PROMPTS, read_prompts

_MODEL = "load"
_SHORT_TOKENS = 4
_CONNECTIONS = 16
# Memory is looked at this often during the short requests.
_SAMPLES = 10


@dataclass
class Stream:
    """One client. expected: the offline text. arrivals: seconds from its request to each piece of text."""

    prompt: int
    expected: str
    cancelled: bool
    text: str = ""
    arrivals: list[float] = field(default_factory=list)
    finished: bool = False


@contextmanager
def serving(arguments: list[str]) -> Iterator[tuple[str, int]]:
    """A server on a free port: its address and process id. Ends it with SIGTERM and expects exit code 0."""
    command = [sys.executable, "-m", "medusa_quant", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(
        [*command, "--served-model-name", _MODEL], stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stderr is not None
    try:
        said = ""
        while (found := re.search(r"http://[\d.]+:\d+", said)) is None:
            line = process.stderr.readline()
            if not line:
                sys.exit(f"error: the server did not start: {said}")
            said += line
        yield found.group(), process.pid
        process.terminate()
        if process.wait(60) != 0:
            sys.exit(f"error: the server ended with {process.returncode}")
    finally:
        process.kill()


async def follow(client: AsyncOpenAI, delay: float, prompt: str, stream: Stream, tokens: int) -> None:
    await asyncio.sleep(delay)
    started = time.perf_counter()
    pieces = await client.chat.completions.create(
        model=_MODEL,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=tokens,
        temperature=0,
        stream=True,
    )
    async for piece in pieces:
        choice = piece.choices[0]
        stream.finished |= choice.finish_reason is not None
        if choice.delta.content:
            stream.text += choice.delta.content
            stream.arrivals.append(time.perf_counter() - started)
        if stream.cancelled and len(stream.text) >= len(stream.expected) // 2:
            await pieces.close()
            return


async def arrive(url: str, streams: list[Stream], prompts: list[str], rate: float, tokens: int) -> None:
    """Gaps between arrivals are exponential with mean 1/rate seconds."""
    draw, due, jobs = random.Random(0), 0.0, []
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        for stream in streams:
            jobs.append(follow(client, due, prompts[stream.prompt], stream, tokens))
            due += draw.expovariate(rate)
        await asyncio.gather(*jobs)


async def short_requests(url: str, pid: int, prompts: list[str], count: int) -> list[tuple[int, float]]:
    """`count` short requests, some at once; the server's resident MB after each tenth of them."""
    memory: list[tuple[int, float]] = []
    free = asyncio.Semaphore(_CONNECTIONS)

    async def ask(client: AsyncOpenAI, index: int) -> None:
        async with free:
            await client.completions.create(
                model=_MODEL, prompt=prompts[index % len(prompts)], max_tokens=_SHORT_TOKENS, temperature=0
            )

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        for start in range(0, count, max(1, count // _SAMPLES)):
            stop = min(count, start + max(1, count // _SAMPLES))
            await asyncio.gather(*(ask(client, index) for index in range(start, stop)))
            memory.append((stop, resident_mb(pid)))
    return memory


def resident_mb(pid: int) -> float:
    """Resident MB of a process (Linux)."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in line)
    return int(line.split()[1]) / 1024


def settled(url: str) -> None:
    """Wait until no request is running or waiting; an error where one stays."""
    for _ in range(100):
        text = httpx.get(f"{url}/metrics").text
        if all(
            float(line.split()[-1]) == 0 for line in text.splitlines() if re.match("vllm:num_requests_", line)
        ):
            return
        time.sleep(0.1)
    sys.exit("error: requests are still running or waiting after the last client left")


def percentiles(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    p50, p99 = statistics.median(ordered), ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return f"p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms"


def judge(streams: list[Stream]) -> None:
    """Print the delays; an error where a text is not the offline one."""
    for number, stream in enumerate(streams):
        whole = (
            stream.expected.startswith(stream.text) if stream.cancelled else stream.text == stream.expected
        )
        if not whole or not (stream.cancelled or stream.finished):
            sys.exit(f"error: stream {number}: {stream.text!r} is not the offline {stream.expected!r}")
    pairs = [zip(stream.arrivals, stream.arrivals[1:], strict=False) for stream in streams]
    gaps = [later - earlier for pair in pairs for earlier, later in pair]
    ended = sum(stream.finished for stream in streams)
    print(
        f"{len(streams)} streams: {ended} finished, {len(streams) - ended} cancelled, each the offline text"
    )
    print("time to first token: ", percentiles([stream.arrivals[0] for stream in streams if stream.arrivals]))
    print("time between pieces: ", percentiles(gaps))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base")
    parser.add_argument("--heads")
    parser.add_argument("--base-dtype", default="int8")
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=4.0, help="arrivals a second")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2000)
    args = parser.parse_args()
    prompts = [prompt.messages[-1][1] for prompt in read_prompts(PROMPTS)]
    offline = Engine(args.base, base_dtype=args.base_dtype, max_batch=args.max_batch)
    texts = [output.text for output in offline.generate(prompts, SamplingParams(max_tokens=args.tokens))]
    offline.close()
    del offline
    streams = [
        Stream(index % len(prompts), texts[index % len(prompts)], index % 3 == 2)
        for index in range(args.streams)
    ]
    arguments = [args.base, "--base-dtype", args.base_dtype, "--max-batch", str(args.max_batch)]
    arguments += ["--max-queue", str(max(args.streams, _CONNECTIONS))]
    arguments += ["--heads", args.heads] if args.heads else []
    with serving(arguments) as (url, pid):
        started = time.perf_counter()
        asyncio.run(arrive(url, streams, prompts, args.rate, args.tokens))
        print(f"{time.perf_counter() - started:.0f} s at {args.rate:g} arrivals a second")
        judge(streams)
        settled(url)
        started = time.perf_counter()
        memory = asyncio.run(short_requests(url, pid, prompts, args.requests))
        settled(url)
        print(f"{args.requests} requests of {_SHORT_TOKENS} tokens in {time.perf_counter() - started:.0f} s")
        print("resident MB after so many:", ", ".join(f"{count} {size:.0f}" for count, size in memory))


if __name__ == "__main__":
    main()
