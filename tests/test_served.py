"""The server of `transformers serve`, asked over HTTP on the loopback while eviction is attached to its model."""

from __future__ import annotations

import json
import socket
import time
import urllib.request

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import decantkv
from tests.support import tiny
from tests.support.families import at_least

if not at_least("5.24"):
    pytest.skip("the server's parts lay elsewhere before 5.24", allow_module_level=True)
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

BUDGET = 0.1


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    from transformers.cli.serve import Serve

    folder = tmp_path_factory.mktemp("served")
    core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(tiny.VOCABULARY)}, unk_token="w1"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="w0", eos_token="w0")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}w5"
    tokenizer.save_pretrained(folder)
    tiny.llama().save_pretrained(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Serve(force_model=str(folder), host="127.0.0.1", port=port, non_blocking=True)
    until = time.monotonic() + 60
    while not server.server.started:
        assert time.monotonic() < until, "the server did not start"
        time.sleep(0.05)
    yield server
    server.kill_server()


def post(server, path, **body):
    address = f"http://127.0.0.1:{server.server.config.port}{path}"
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode(), headers), timeout=60) as got:
        return got.read().decode()


def words(ids):
    return " ".join(f"w{i}" for i in ids)


@pytest.mark.parametrize("way", ["completion", "stream", "chat"])
def test_the_server_says_what_generate_says(server, way):
    (loaded,) = server._model_manager.loaded_models.values()
    ids = [*tiny.prompt(149, seed=3)[0].tolist(), 5]
    options = {"max_tokens": 6, "temperature": 0}
    with decantkv.attach(loaded.model, budget=BUDGET) as run:
        if way == "completion":
            said = json.loads(post(server, "/v1/completions", prompt=words(ids), **options))["choices"][0]["text"]
        elif way == "stream":
            lines = post(server, "/v1/completions", prompt=words(ids), stream=True, **options).splitlines()
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            said = "".join(chunk["choices"][0]["text"] or "" for chunk in chunks)
        else:
            messages = [{"role": "user", "content": words(ids[:-1])}]
            answer = json.loads(post(server, "/v1/chat/completions", messages=messages, **options))
            said = answer["choices"][0]["message"]["content"]
    assert [layer["kept"] for layer in run.report().layers] == [[[15, 15]]] * 3
    prompt = tiny.prompt(149, seed=3).new_tensor([ids])
    with decantkv.attach(loaded.model, budget=BUDGET):
        evicted = loaded.model.generate(prompt, max_new_tokens=6, **tiny.GREEDY)[0, 150:].tolist()
    assert said.split() == words(evicted).split()
    assert loaded.model.generate(prompt, max_new_tokens=6, **tiny.GREEDY)[0, 150:].tolist() != evicted
