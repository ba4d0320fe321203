"""The server, over real sockets: OpenAI's own client, and raw HTTP where a client would not misbehave."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from draft_heads import save_heads

from medusa_quant import Engine, SamplingParams
from medusa_quant.cli import main
from medusa_quant.serving.app import Limits, Service, build_app
from medusa_quant.serving.server import Server, bind

KEY = "a key"
CONTEXT = 96
LIMITS = Limits(max_queue=4, max_body=5000)


@pytest.fixture(scope="module")
def engine(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(
        tiny_base, save_heads(tmp_path_factory.mktemp("served") / "heads"), max_batch=2, max_len=CONTEXT
    )


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    service, listener = Service(engine, "tiny", LIMITS), bind("127.0.0.1", 0)
    server = Server(build_app(service, KEY), service, drain_seconds=5)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(20)


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def alone(tiny_base: Path) -> Engine:
    """The same base without heads: what every greedy text must be."""
    return Engine(tiny_base, max_batch=1, max_len=CONTEXT)


def _post(url: str, body: Any, path: str = "completions", key: str | None = KEY) -> httpx.Response:
    content = body if isinstance(body, bytes | str) else json.dumps(body)
    headers: dict[str, str | bytes] = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}".encode()
    return httpx.post(f"{url}/v1/{path}", content=content, headers=headers, timeout=60)


def _asked(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "one fish", "max_tokens": 8, "temperature": 0, **fields}


def test_completions_are_the_offline_text(client: openai.OpenAI, alone: Engine) -> None:
    prompts = ["one fish", "two fish", "red fish"]
    params = SamplingParams(max_tokens=20)
    wanted = alone.generate(prompts, params, chat=False)
    got = client.completions.create(model="tiny", prompt=prompts, max_tokens=20, temperature=0)
    assert [choice.text for choice in got.choices] == [output.text for output in wanted]
    assert [choice.index for choice in got.choices] == [0, 1, 2]
    assert got.usage is not None
    assert got.usage.completion_tokens == sum(len(output.token_ids) for output in wanted)
    ids = client.completions.create(
        model="tiny", prompt=alone.encode("one fish", chat=False), max_tokens=20, temperature=0
    )
    assert ids.choices[0].text == wanted[0].text


def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI, alone: Engine) -> None:
    messages: list[Any] = [{"role": "user", "content": "blue fish"}]
    wanted = alone.generate([alone.encode_messages(messages)], SamplingParams(max_tokens=24))[0]
    asked: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == wanted.text
    usage = {"include_usage": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=usage))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == wanted.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == wanted.finish_reason
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(wanted.token_ids)
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_seed_repeats_a_draw_and_none_does_not(client: openai.OpenAI) -> None:
    def ask(seed: int | None) -> str:
        extra: dict[str, Any] = {} if seed is None else {"seed": seed}
        done = client.completions.create(
            model="tiny",
            prompt="fish",
            max_tokens=24,
            temperature=1.5,
            extra_body={"ignore_eos": True},
            **extra,
        )
        return done.choices[0].text

    assert ask(7) == ask(7)
    assert len({ask(None) for _ in range(4)}) > 1


def test_stop_strings_end_a_text(client: openai.OpenAI, alone: Engine) -> None:
    text = alone.generate(["one fish"], SamplingParams(max_tokens=20), chat=False)[0].text
    stop = text[5:7]
    got = client.completions.create(model="tiny", prompt="one fish", max_tokens=20, temperature=0, stop=stop)
    assert got.choices[0].text == text[: text.index(stop)]
    assert got.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (_asked(model="gpt-9"), 404, "'tiny'"),
        ("{not json", 400, "not JSON"),
        (b"\xff\xfe", 400, "body"),
        ([1, 2], 400, "body"),
        (_asked(n=2), 400, "n:"),
        (_asked(prompt="x" * 200), 400, f"the context holds {CONTEXT} tokens; the prompt has 200"),
        (_asked(max_tokens=10**9), 400, "1000000000 to write"),
        (_asked(max_tokens=0), 400, "max_tokens"),
        (_asked(max_tokens="8"), 400, "max_tokens"),
        (_asked(stop=5), 400, "stop"),
        (_asked(stop=["a", 5]), 400, "stop"),
        (_asked(stop=[""]), 400, "stop"),
        (_asked(temperature=-1), 400, "temperature"),
        (_asked(top_p=0), 400, "top_p"),
        (_asked(prompt=""), 400, "empty"),
        (_asked(prompt=[]), 400, "prompt"),
        (_asked(prompt=[3, 999]), 400, "0..130"),
        (_asked(prompt=["a", "b"], stream=True), 400, "one text"),
        (_asked(best_of=3), 400, "best_of"),
        (_asked(frequency_penalty=0.5), 400, "frequency_penalty"),
        (_asked(typo=1), 400, "typo: is not supported"),
        ({"prompt": "a"}, 400, "model"),
        (_asked(prompt="x" * 9000), 413, "5,000 bytes"),
    ],
)
def test_bad_bodies_are_refused_with_a_reason(url: str, body: Any, status: int, says: str) -> None:
    answer = _post(url, body)
    assert answer.status_code == status, answer.text
    assert says in answer.json()["error"]["message"]


def test_a_chunked_body_over_the_limit_is_refused_too(url: str) -> None:
    chunks = (b" " * 1000 for _ in range(20))
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{url}/v1/completions", content=chunks, headers=headers)
    assert answer.status_code == 413


@pytest.mark.parametrize("key", [None, "another key", "ä"])
def test_without_the_key_nothing_is_answered_but_health(url: str, key: str | None) -> None:
    assert _post(url, _asked(), key=key).status_code == 401
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.get(f"{url}/health").status_code == 200


def test_other_paths_and_methods_answer_as_the_api_does(url: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    assert httpx.get(f"{url}/v1/embeddings", headers=headers).json()["error"]["code"] is None
    assert httpx.get(f"{url}/v1/embeddings", headers=headers).status_code == 404
    assert httpx.get(f"{url}/v1/completions", headers=headers).status_code == 405


def test_models_names_the_model_and_its_context(client: openai.OpenAI) -> None:
    models = list(client.models.list())
    assert [model.id for model in models] == ["tiny"]
    assert models[0].model_dump()["max_model_len"] == CONTEXT


def _metric(url: str, name: str) -> float:
    found = re.findall(rf"^{name}\{{.*\}} ([0-9.e+]+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    return sum(map(float, found))


def _settled(url: str) -> bool:
    for _ in range(200):
        if _metric(url, "vllm:num_requests_running") + _metric(url, "vllm:num_requests_waiting") == 0:
            return True
        time.sleep(0.05)
    return False


def test_a_client_that_leaves_ends_its_request(url: str, engine: Engine) -> None:
    for stream in (True, False):
        cancelled = _metric(url, "vllm:request_success_total")
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps(_asked(max_tokens=80, stream=stream, ignore_eos=True)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        real = engine.batch.step

        def slow(real: Any = real) -> Any:
            time.sleep(0.02)
            return real()

        engine.batch.step = slow  # type: ignore[method-assign]
        try:
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(head.encode() + body)
                time.sleep(0.3)
            before = engine.metrics.generation_tokens
            assert _settled(url)
        finally:
            engine.batch.step = real  # type: ignore[method-assign]
        assert engine.metrics.generation_tokens - before < 60
        assert _metric(url, "vllm:request_success_total") == cancelled + 1
    assert 'finished_reason="cancelled"' in httpx.get(f"{url}/metrics").text


def test_beyond_slots_and_queue_requests_get_429_and_the_rest_are_served(url: str, alone: Engine) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    wanted = alone.generate(["one fish"], params, chat=False)[0].text
    body = _asked(max_tokens=60, ignore_eos=True)
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda _: _post(url, body), range(24)))
    served = [answer for answer in answers if answer.status_code == 200]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert len(served) >= 6
    assert {answer.json()["choices"][0]["text"] for answer in served} == {wanted}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.headers["retry-after"] == "1"
    assert _settled(url)


def test_a_reader_that_is_slow_holds_up_nobody(url: str, client: openai.OpenAI) -> None:
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(_asked(max_tokens=80, stream=True, ignore_eos=True)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        raw.sendall(head.encode() + body)
        started = time.monotonic()
        got = client.completions.create(model="tiny", prompt="two fish", max_tokens=8, temperature=0)
        assert got.choices[0].text
        assert time.monotonic() - started < 10
    assert _settled(url)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_engine_is_an_error_not_a_hang(tiny_base: Path) -> None:
    import asyncio

    before = {thread.ident for thread in threading.enumerate()}
    engine = Engine(tiny_base, max_batch=1, max_len=CONTEXT)

    def broken() -> Any:
        raise MemoryError("no more")

    engine.batch.step = broken  # type: ignore[method-assign]

    async def read() -> None:
        async for _ in engine.stream("one fish", SamplingParams(max_tokens=4), chat=False):
            pass

    with pytest.raises(RuntimeError, match="the engine has failed"):
        asyncio.run(asyncio.wait_for(read(), 10))
    for thread in threading.enumerate():
        if thread.name == "medusa-quant-engine" and thread.ident not in before:
            thread.join(10)  # its traceback belongs to this test, not to the next


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--port", "{taken}"], "cannot listen on 127.0.0.1 port"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
        (["--heads", "{other}"], "these heads are for another base"),
        (["--max-queue", "-1"], "bad --max-queue"),
    ],
)
def test_what_cannot_be_served_is_one_line_before_it_starts(
    tiny_base: Path, options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from safetensors.torch import save_file

    save_file(
        {"0.0.linear.weight": torch.zeros(32, 32), "0.1.weight": torch.zeros(131, 32)},
        tmp_path / "o.safetensors",
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        values = {"taken": taken.getsockname()[1], "other": tmp_path / "o.safetensors"}
        words = [option.format(**values) for option in options]
        if "--port" not in words:
            words += ["--port", "0"]
        before, sys.argv = sys.argv, ["medusa-quant", "serve", str(tiny_base), *words]
        try:
            with pytest.raises(SystemExit) as end:
                main()
        finally:
            sys.argv = before
    assert end.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert [says in line for line in said] == [True]


def test_a_chat_with_real_heads_drains_on_sigterm(smollm2: Path, trained_heads: Path, tmp_path: Path) -> None:
    """int4 heads of SmolLM2 behind the command: streamed text is the offline one, acceptance is counted,
    and SIGTERM lets an open stream end."""
    from medusa_quant import ConvertOptions, convert, load_heads

    convert(load_heads(trained_heads), tmp_path / "int4", ConvertOptions(dtype="int4"))
    messages: list[Any] = [{"role": "user", "content": "Write a Python loop over a list."}]
    engine = Engine(smollm2, base_dtype="int8", max_len=256)
    wanted = engine.generate([engine.encode_messages(messages)], SamplingParams(max_tokens=48))[0].text
    command = [sys.executable, "-m", "medusa_quant", "serve", str(smollm2), "--heads", str(tmp_path / "int4")]
    command += ["--port", "0", "--base-dtype", "int8", "--max-len", "256", "--served-model-name", "smollm2"]
    command += ["--speculation", "chain"]
    environment = {**os.environ, "COLUMNS": "300"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"http://[\d.]+:\d+", line)
            assert found, line
            url = found.group()
            for _ in range(100):
                try:
                    if httpx.get(f"{url}/health").status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.1)
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            asked: dict[str, Any] = {"model": "smollm2", "messages": messages, "temperature": 0}
            stream = client.chat.completions.create(**asked, max_tokens=48, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == wanted
            drafts = _metric(url, "vllm:spec_decode_num_drafts_total")
            accepted = _metric(url, "vllm:spec_decode_num_accepted_tokens_total")
            assert 1.1 < 1 + accepted / drafts < 2.5
            assert _metric(url, "medusa_quant:mean_acceptance_length") == pytest.approx(1 + accepted / drafts)
            late = client.chat.completions.create(**asked, max_tokens=48, stream=True)
            pieces = [next(late).choices[0].delta.content or ""]
            process.send_signal(signal.SIGTERM)
            pieces += [chunk.choices[0].delta.content or "" for chunk in late]
            assert "".join(pieces) == wanted
            assert process.wait(30) == 0
        finally:
            process.kill()
