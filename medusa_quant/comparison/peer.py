"""Run as a program, in the peer's own environment: times one peer on prompts and prints JSON.

python peer.py NAME TASK.json, where the task holds base, prompts (token ids), tokens, batch and threads.
Needs nothing but the peer. The loading of the model is not timed; a first short text warms it up.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any


def llama_cpp(task: dict[str, Any]) -> dict[str, Any]:
    from llama_cpp import Llama

    if task["batch"] != 1:
        sys.exit("llama-cpp-python decodes one prompt at a time")
    if Path(task["base"]).suffix != ".gguf":
        sys.exit("llama.cpp needs a .gguf base")
    longest = max(map(len, task["prompts"])) + task["tokens"] + 8
    model = Llama(task["base"], n_ctx=longest, n_threads=task["threads"], verbose=False)

    def write(prompt: list[int], count: int) -> int:
        model.reset()
        written = 0
        for _ in model.generate(prompt, temp=0.0, reset=True):
            written += 1
            if written == count:
                break
        return written

    write(task["prompts"][0], 8)
    started = time.perf_counter()
    tokens = sum(write(prompt, task["tokens"]) for prompt in task["prompts"])
    return _result("llama-cpp-python", tokens, started)


def transformers(task: dict[str, Any]) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(task["threads"])
    path = Path(task["base"])
    source = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if source else path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **source).eval()

    def write(prompts: list[list[int]], count: int) -> int:
        width = max(map(len, prompts))
        padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        output = model.generate(padded, attention_mask=mask, **options)
        return int(output[:, width:].numel())

    prompts, batch = task["prompts"], task["batch"]
    write(prompts[:1], 8)
    started = time.perf_counter()
    tokens = sum(write(prompts[at : at + batch], task["tokens"]) for at in range(0, len(prompts), batch))
    return _result("transformers", tokens, started)


def vllm(task: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    longest = max(map(len, task["prompts"])) + task["tokens"] + 8
    model = LLM(task["base"], max_num_seqs=task["batch"], max_model_len=longest)
    prompts = [{"prompt_token_ids": prompt} for prompt in task["prompts"]]
    model.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=8))
    params = SamplingParams(temperature=0, max_tokens=task["tokens"], ignore_eos=True)
    started = time.perf_counter()
    outputs = model.generate(prompts, params)
    return _result("vllm", sum(len(output.outputs[0].token_ids) for output in outputs), started)


def _result(package: str, tokens: int, started: float) -> dict[str, Any]:
    seconds = time.perf_counter() - started
    return {"version": f"{package} {version(package)}", "tokens": tokens, "seconds": seconds}


if __name__ == "__main__":
    peers = {"llama.cpp": llama_cpp, "transformers": transformers, "vllm": vllm}
    with open(sys.argv[2], encoding="utf-8") as file:
        print(json.dumps(peers[sys.argv[1]](json.load(file))))
