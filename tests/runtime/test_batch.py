"""The loop gives the base's own text: whatever heads, dtype, tree, batch and schedule."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from draft_heads import converted, save_heads
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from medusa_quant import MedusaHeads
from medusa_quant.errors import InputError
from medusa_quant.runtime.batch import LlamaBatch
from medusa_quant.runtime.heads import DraftHeads
from medusa_quant.runtime.model import LlamaModel, Segment, load_base
from medusa_quant.runtime.request import Request, SamplingParams
from medusa_quant.runtime.speculation import Speculation
from medusa_quant.runtime.tree import Tree, named_tree

GENERATOR = torch.Generator().manual_seed(4)
PROMPTS = [torch.randint(3, 131, (1 + 5 * n % 23,), generator=GENERATOR).tolist() for n in range(32)]


@pytest.fixture(scope="module")
def base(tiny_llama: Path) -> LlamaModel:
    return load_base(tiny_llama)


@pytest.fixture(scope="module")
def sources(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Heads of L 1 and 2 whose LM matrix is the base's: some of their guesses are right."""
    from safetensors.torch import load_file

    lm_head = load_file(tiny_llama / "model.safetensors")["lm_head.weight"]
    folder = tmp_path_factory.mktemp("heads")
    return {layers: save_heads(folder / f"L{layers}", 3, layers, lm_head, 0.02) for layers in (1, 2)}


def greedy(base: LlamaModel, prompt: list[int], count: int, ignore_eos: bool = False) -> list[int]:
    """Plain greedy decoding, one token at a time, without any of the loop's code."""
    ends = () if ignore_eos else base.config.eos_token_ids
    cache, tokens = base.new_cache(1, 256), list(prompt)
    hidden = base.forward(
        torch.tensor(tokens), torch.arange(len(tokens)), [Segment(0, 0, len(tokens))], cache
    )
    while True:
        tokens.append(int(base.logits(hidden[-1:]).argmax()))
        if len(tokens) - len(prompt) == count or tokens[-1] in ends:
            return tokens[len(prompt) :]
        place = torch.tensor([len(tokens) - 1])
        hidden = base.forward(torch.tensor(tokens[-1:]), place, [Segment(0, len(tokens) - 1, 1)], cache)


@pytest.fixture(scope="module")
def expected(base: LlamaModel) -> list[list[int]]:
    return [greedy(base, prompt, 40) for prompt in PROMPTS]


def run(
    base: LlamaModel,
    heads: DraftHeads | None,
    prompts: list[list[int]],
    params: SamplingParams,
    tree: str = "default",
    mode: str = "tree",
    **options: int,
) -> tuple[list[Request], LlamaBatch]:
    policy = Speculation.named(mode if heads else "off", tree, heads.num_heads if heads else 0)
    batch = LlamaBatch(base, heads, speculation=policy, **options)
    requests = [Request(str(number), prompt, params) for number, prompt in enumerate(prompts)]
    for request in requests:
        batch.add(request)
    while batch.has_work:
        batch.step()
    return requests, batch


def test_plain_greedy_equals_transformers(tiny_llama: Path, expected: list[list[int]]) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    for prompt, own in list(zip(PROMPTS, expected, strict=True))[:6]:
        found = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0)[
            0, len(prompt) :
        ]
        assert found.tolist() == own


@pytest.mark.parametrize("tree", ["none", "chain", "default", "deep"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("dtype", ["fp16", "int8", "int4"])
def test_tokens_are_those_of_plain_greedy(
    dtype: str, layers: int, tree: str, base: LlamaModel, sources: dict[int, Path], expected: list[list[int]]
) -> None:
    checkpoint = converted(sources[layers], dtype)
    heads = DraftHeads(checkpoint, base, activation="exact")
    for size in (1, 2, 7, 32):
        count = min(size, 32) if size > 2 else 4
        requests, batch = run(
            base,
            heads,
            PROMPTS[:count],
            SamplingParams(max_tokens=40),
            tree,
            max_batch=size,
            prefill_chunk=16,
        )
        assert [request.generated for request in requests] == expected[:count]
    # Broken heads would give the same text: what was accepted must be what these heads deserve.
    deserved = [simulate(base, checkpoint, named_tree(tree, 3), n, expected[n]) for n in range(32)]
    metrics = batch.metrics
    assert (metrics.drafts, metrics.accepted_tokens) == tuple(map(sum, zip(*deserved, strict=True)))
    if tree in ("default", "deep"):
        assert metrics.mean_acceptance_length > 1.2


def simulate(
    base: LlamaModel, heads: MedusaHeads, tree: Tree, number: int, text: list[int]
) -> tuple[int, int]:
    """(drafts, accepted tokens) the loop must count for one prompt: the heads in fp64, path by path."""
    if tree.nodes == 1:
        return 0, 0
    prompt = PROMPTS[number]
    # A step's drafts may be right beyond the end of the text.
    tokens = prompt + greedy(base, prompt, len(text) + 4, ignore_eos=True)
    end = len(prompt) + len(text)
    places = torch.arange(len(tokens))
    hidden = base.forward(torch.tensor(tokens), places, [Segment(0, 0, len(tokens))], base.new_cache(1, 256))
    best = []
    for head in range(heads.num_heads):
        state = hidden.double()
        for layer in range(heads.num_layers):
            bias = heads.resblock_bias(head, layer)
            assert bias is not None
            weight = heads.resblock_weight(head, layer).dense().double()
            state = state + torch.nn.functional.silu(state @ weight.t() + bias.dense().double())
        lm_head = heads.lm_head(head)
        assert lm_head is not None
        best.append((state @ lm_head.dense().double().t()).topk(tree.top_k).indices.tolist())
    drafts, accepted, at = 0, 0, len(prompt) - 1
    # `at` is the last token verified; the next one, the root, is known.
    while at + 2 < end:
        lengths = [0]
        for choice in tree.choices:
            wanted = tokens[at + 2 : at + 2 + len(choice)]
            drafted = [best[head][at][rank] for head, rank in enumerate(choice)]
            lengths.append(len(choice) if drafted == wanted else 0)
        drafts, accepted, at = drafts + 1, accepted + max(lengths), at + 1 + max(lengths)
    return drafts, accepted


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("cache_tokens", [70, 100, None])
def test_prefill_chunks_and_preemption(
    chunk: int,
    cache_tokens: int | None,
    base: LlamaModel,
    sources: dict[int, Path],
    expected: list[list[int]],
) -> None:
    heads = DraftHeads(converted(sources[1], "int4"), base)
    requests, batch = run(
        base,
        heads,
        PROMPTS[:8],
        SamplingParams(max_tokens=40),
        max_batch=8,
        max_len=70,
        prefill_chunk=chunk,
        cache_tokens=cache_tokens,
    )
    assert [request.generated for request in requests] == expected[:8]
    assert (batch.metrics.preemptions > 0) == (cache_tokens is not None)
    assert sum(request.preemptions for request in requests) == batch.metrics.preemptions


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_schedule(
    data: st.DataObject, base: LlamaModel, sources: dict[int, Path], expected: list[list[int]]
) -> None:
    """Arrivals, cancels and lengths at any step never change another request's text."""
    heads = DraftHeads(converted(sources[1], "int8"), base)
    batch = LlamaBatch(
        base,
        heads,
        max_batch=data.draw(st.integers(1, 5)),
        max_len=80,
        cache_tokens=data.draw(st.sampled_from([80, 120, 400])),
        prefill_chunk=data.draw(st.integers(1, 20)),
        speculation=Speculation.named(
            data.draw(st.sampled_from(["auto", "tree", "chain", "off"])), "default", 3
        ),
    )
    requests, cancelled = [], set()
    for number in range(data.draw(st.integers(1, 8))):
        length = data.draw(st.integers(1, 40))
        request = Request(str(number), PROMPTS[number], SamplingParams(max_tokens=length))
        requests.append(request)
        batch.add(request)
        for _ in range(data.draw(st.integers(0, 4))):
            batch.step()
        if data.draw(st.booleans()) and data.draw(st.booleans()):
            victim = data.draw(st.sampled_from(requests))
            if victim.finish_reason is None:
                cancelled.add(victim.id)
            batch.cancel(victim)
    for _ in range(500):
        if not batch.has_work:
            break
        batch.step()
    assert not batch.has_work
    for number, request in enumerate(requests):
        whole = expected[number][: request.params.max_tokens]
        if request.id in cancelled:
            assert request.finish_reason == "cancelled"
            assert request.generated == whole[: len(request.generated)]
        else:
            assert request.generated == whole


@pytest.mark.parametrize("scale", [3.0, 0.0, float("nan")])
def test_broken_heads_still_give_right_text(
    scale: float, base: LlamaModel, tmp_path: Path, expected: list[list[int]]
) -> None:
    from medusa_quant import load_heads

    heads = DraftHeads(load_heads(save_heads(tmp_path / "h", scale=scale)), base)
    requests, batch = run(base, heads, PROMPTS[:4], SamplingParams(max_tokens=40), max_batch=4)
    assert [request.generated for request in requests] == expected[:4]
    assert heads.nan_heads == ({0, 1, 2} if scale != scale else set())
    assert batch.metrics.mean_acceptance_length < 1.3


def test_sampling_reproduces_by_seed_whatever_the_batch(base: LlamaModel, sources: dict[int, Path]) -> None:
    heads = DraftHeads(converted(sources[1], "int4"), base)
    texts = []
    for own, size, tree in (
        (None, 1, "none"),
        (heads, 1, "chain"),
        (heads, 6, "default"),
        (heads, 3, "deep"),
    ):
        params = SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, top_k=50, seed=17)
        requests, _ = run(
            base,
            own,
            PROMPTS[:6],
            params,
            tree,
            max_batch=size,
            max_len=60,
            cache_tokens=90 if size == 6 else None,
        )
        texts.append([request.generated for request in requests])
    assert texts[0] == texts[1] == texts[2] == texts[3]
    other, _ = run(base, heads, PROMPTS[:6], SamplingParams(max_tokens=30, temperature=0.8, seed=18))
    assert [request.generated for request in other] != texts[0]


def test_typical_acceptance_takes_more_drafts(base: LlamaModel, sources: dict[int, Path]) -> None:
    heads = DraftHeads(converted(sources[1], "fp16"), base)
    lengths = []
    for rule in ("exact", "typical"):
        params = SamplingParams(max_tokens=40, temperature=1.0, seed=1, acceptance=rule, typical_eps=0.01)
        _, batch = run(base, heads, PROMPTS[:8], params, max_batch=8)
        lengths.append(batch.metrics.mean_acceptance_length)
    assert lengths[1] > lengths[0]


def test_the_context_limit_is_reached_exactly(base: LlamaModel, sources: dict[int, Path]) -> None:
    heads = DraftHeads(converted(sources[1], "int8"), base)
    prompt = PROMPTS[4]
    limit = len(prompt) + 11
    whole = greedy(base, prompt, 11)
    requests, _ = run(base, heads, [prompt], SamplingParams(max_tokens=99, ignore_eos=True), max_len=limit)
    assert requests[0].finish_reason == "length"
    assert len(requests[0].tokens) == limit
    assert requests[0].generated[: len(whole)] == whole
    full = Request("full", (prompt * 10)[:limit])
    batch = LlamaBatch(base, heads, max_len=limit)
    batch.add(full)
    assert (full.finish_reason, full.generated, batch.has_work) == ("length", [], False)


def test_the_models_own_limit(base: LlamaModel, sources: dict[int, Path]) -> None:
    """Trees that would reach past the last position the model knows."""
    heads = DraftHeads(converted(sources[1], "int8"), base)
    prompt = (PROMPTS[3] * 60)[:250]
    requests, _ = run(base, heads, [prompt], SamplingParams(max_tokens=50, ignore_eos=True), max_batch=1)
    assert len(requests[0].tokens) == base.config.max_position_embeddings


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([], "empty"), ([5] * 41, "longer than the context"), ([131], "0..130"), ([-1], "0..130")],
)
def test_prompts_that_cannot_run(prompt: list[int], words: str, base: LlamaModel) -> None:
    batch = LlamaBatch(base, max_len=40)
    with pytest.raises(InputError, match=words):
        batch.add(Request("x", prompt))
    assert not batch.has_work


def test_max_tokens_0(base: LlamaModel) -> None:
    batch = LlamaBatch(base, max_len=40)
    request = Request("x", [5], SamplingParams(max_tokens=0))
    batch.add(request)
    assert (request.finish_reason, request.generated) == ("length", [])


def test_stop_ids_cancel_and_deadline(base: LlamaModel, expected: list[list[int]]) -> None:
    stop = expected[0][3]
    requests, _ = run(base, None, PROMPTS[:1], SamplingParams(max_tokens=40, stop_token_ids=(stop,)))
    first = expected[0].index(stop)
    assert (requests[0].finish_reason, requests[0].generated) == ("stop", expected[0][: first + 1])
    batch = LlamaBatch(base, max_len=80)
    late = Request("late", PROMPTS[1], SamplingParams(max_tokens=40), deadline=time.monotonic() - 1)
    batch.add(late)
    assert batch.step() == [late]
    assert late.finish_reason == "deadline"


def test_a_thousand_requests_queue_in_order(base: LlamaModel) -> None:
    batch = LlamaBatch(base, max_batch=32, max_len=16)
    requests = [Request(str(n), [3 + n % 100], SamplingParams(max_tokens=1 + n % 3)) for n in range(1000)]
    for request in requests:
        batch.add(request)
    started: list[str] = []
    for request in requests:
        request.on_tokens = lambda r, _: started.append(r.id)
    while batch.has_work:
        batch.step()
    assert all(len(r.generated) == r.params.max_tokens or r.finish_reason == "stop" for r in requests)
    assert list(dict.fromkeys(started)) == [str(n) for n in range(1000)]


def test_heads_of_another_base(base: LlamaModel, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from medusa_quant import load_heads

    save_file({"0.0.linear.weight": torch.zeros(32, 32)}, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(InputError, match="another base"):
        DraftHeads(load_heads(tmp_path), base)
    save_file(
        {"0.0.linear.weight": torch.zeros(48, 48), "0.1.weight": torch.zeros(7, 48)},
        tmp_path / "medusa_lm_head.safetensors",
    )
    with pytest.raises(InputError, match="another vocabulary"):
        DraftHeads(load_heads(tmp_path), base)
