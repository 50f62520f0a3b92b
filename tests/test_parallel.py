"""A model spread over processes or devices: every part decides about its own heads or layers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch
from transformers import LlamaForCausalLM

import decantkv
from decantkv.selection.selector import select
from tests.support import tiny
from tests.support.judge import logits_with
from tests.support.ranks import ALONE, LAYERS, PROMPTS, TOGETHER, read, selections


def launched(folder, **environment):
    """What two processes found, and the model in one piece."""
    whole = tiny.llama(num_key_value_heads=4, vocab_size=200)  # 5.17 spreads even vocabularies only
    whole.save_pretrained(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launched = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        here = {**os.environ, **{k: str(v) for k, v in place.items()}, "OMP_NUM_THREADS": "1", **environment}
        command = [sys.executable, "-m", "tests.support.ranks", str(folder), str(folder)]
        launched.append(
            subprocess.Popen(
                command, cwd=tiny.ROOT, env=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        said = [process.communicate(timeout=240)[0] for process in launched]
    finally:
        for process in launched:
            process.kill()
    assert [process.returncode for process in launched] == [0, 0], "\n".join(said)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)], whole


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Two processes over gloo, on the CPU."""
    return launched(tmp_path_factory.mktemp("parallel"), CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_agree_as_two_processes_do(tmp_path):
    found, whole = launched(tmp_path)
    whole = whole.to("cuda:0")
    for name, (settings, inputs) in PROMPTS.items():
        _, kept = read(whole, decantkv.EvictingCache(whole, **settings, budget=0.2), inputs)
        for layer, mask in kept.items():
            both = torch.cat([here[name]["kept"][layer] for here in found], 1)
            assert int((both & mask).sum()) >= 0.97 * int(mask.sum()), name
            assert int(both.sum()) == int(mask.sum()), name
    for here in found:
        assert here["device"] == "cuda"
        assert {here[name]["deciding"] for name in ALONE} == {0}
        assert {here[name]["deciding"] for name in TOGETHER} == {LAYERS}
    for number, (scores, options) in enumerate(selections()):
        chosen = torch.cat([here["chosen"][number] for here in found], 1)
        assert torch.equal(chosen, select(scores.cuda(), **options).mask(scores.shape[2]).cpu()), options


@pytest.mark.parametrize("name", PROMPTS)
def test_each_rank_keeps_what_one_process_keeps_for_its_heads(ranks, name):
    found, whole = ranks
    settings, inputs = PROMPTS[name]
    logits, kept = read(whole, decantkv.EvictingCache(whole, **settings, budget=0.2), inputs)
    for rank, here in enumerate(found):
        torch.testing.assert_close(here[name]["logits"], logits, rtol=0, atol=1e-5)
        for layer, mask in kept.items():
            assert torch.equal(here[name]["kept"][layer], mask[:, 2 * rank : 2 * rank + 2])


def test_heads_that_compete_across_ranks_differ_in_what_they_keep(ranks):
    """Else the tests above would pass with every process for itself."""
    for name in ("ada", "heads"):
        sizes = [[int(mask.sum()) for mask in here[name]["kept"].values()] for here in ranks[0]]
        assert sizes[0] != sizes[1]


def test_deciding_exchanges_nothing_or_once_a_layer(ranks):
    found, whole = ranks
    with decantkv.attach(whole, budget=0.2):
        generated = whole.generate(tiny.prompt(120), max_new_tokens=6, **tiny.GREEDY)
    for here in found:
        assert here["exchanges"] > 0, "the model's own exchanges were seen"
        assert here["deciding"] == 0
        assert {name: here[name]["deciding"] for name in ALONE} == dict.fromkeys(ALONE, 0)
        assert {name: here[name]["deciding"] for name in TOGETHER} == dict.fromkeys(TOGETHER, LAYERS)
        assert torch.equal(here["generated"], generated)


def test_an_answer_is_evicted_alike_by_all_ranks(ranks):
    found, whole = ranks
    with decantkv.attach(whole, allocation="shared", budget=26, every=4) as run:
        generated = whole.generate(tiny.prompt(120), max_new_tokens=14, **tiny.GREEDY)
    assert run.report().rounds == 3 * LAYERS
    for here in found:
        assert here["rounds"] == 3 * LAYERS
        assert torch.equal(here["renewed"], generated)


def test_ranks_choose_from_the_same_scores_what_one_process_chooses(ranks):
    for number, (scores, options) in enumerate(selections()):
        mask = select(scores, **options).mask(scores.shape[2])
        assert torch.equal(torch.cat([here["chosen"][number] for here in ranks[0]], 1), mask), options


def test_what_would_take_more_exchanges_is_refused_by_name(ranks):
    for here in ranks[0]:
        layer, stages = here["refused"].values()
        assert layer.startswith("allocation: expected one that is settled layer by layer for a model spread over 2")
        assert "its second stage looks at all heads again" in stages


def on_devices(tmp_path, places, **options):
    """The same weights in one piece and spread by a device map."""
    whole = tiny.llama(num_hidden_layers=4)
    whole.save_pretrained(tmp_path / "model")
    first, *_, last = places.values()
    rest = {"model.embed_tokens": first, "model.rotary_emb": first, "model.norm": last, "lm_head": last}
    layers = {f"model.layers.{i}": place for i, place in places.items()}
    spread = LlamaForCausalLM.from_pretrained(tmp_path / "model", device_map={**rest, **layers}, **options)
    return whole, spread.eval()


def same_on_devices(whole, spread, first):
    for rows in ([tiny.prompt(120)], [tiny.prompt(120, seed=1), tiny.prompt(50, seed=2)]):
        batch = tiny.left_padded(rows)
        moved = {name: x.to(first) for name, x in batch.items()}
        for method, allocation in (("dropkv", "uniform"), ("h2o", "shared"), ("dropkv", "ada")):
            settings = {"method": method, "budget": 0.3, "allocation": allocation}
            with decantkv.attach(whole, **settings) as run:
                expected = whole.generate(**batch, max_new_tokens=6, **tiny.GREEDY)
            with decantkv.attach(spread, **settings) as other:
                assert torch.equal(spread.generate(**moved, max_new_tokens=6, **tiny.GREEDY).cpu(), expected)
            assert [r["kept"] for r in other.report().layers] == [r["kept"] for r in run.report().layers]


def test_layers_whose_weights_lie_on_the_disk(tmp_path):
    places = {0: "cpu", 1: "disk", 2: "cpu", 3: "disk"}
    whole, spread = on_devices(tmp_path, places, offload_folder=tmp_path / "offloaded")
    assert {p.device.type for p in spread.model.layers[1].parameters()} == {"meta"}
    same_on_devices(whole, spread, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_layers_on_two_gpus(tmp_path):
    whole, spread = on_devices(tmp_path, {0: 0, 1: 0, 2: 1, 3: 1})
    same_on_devices(whole, spread, "cuda:0")
    cache = decantkv.EvictingCache(spread, budget=0.2)
    logits_with(spread, cache, {"input_ids": tiny.prompt(120).to("cuda:0")}, [])
    assert [layer.keys.device.index for layer in cache.layers] == [0, 0, 1, 1]
    assert [layer.kept.indices.device.index for layer in cache.layers] == [0, 0, 1, 1]
