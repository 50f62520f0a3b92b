"""Loading, and the demo model itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import decantkv
from decantkv.models import cache_folder, convert_gguf
from tests import tiny
from tests.judge import evicted_and_judged


@pytest.mark.model
def test_a_gguf_is_converted_once(model_path, demo_model, monkeypatch):
    from pathlib import Path

    folder = convert_gguf(Path(model_path))
    assert folder.parent == cache_folder()
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    assert convert_gguf(Path(model_path)) == folder
    model, _ = demo_model
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not [p for p in folder.parent.iterdir() if p.name.startswith(".converting")]


@pytest.mark.model
def test_two_processes_that_convert_at_once_share_one_folder(model_path, tmp_path):
    code = "import sys; from decantkv.models import convert_gguf; print(convert_gguf(sys.argv[1]))"
    environment = {**os.environ, "DECANTKV_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", code, str(model_path)]
    runs = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [run.communicate(timeout=300)[0].strip() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert said[0] == said[1]
    assert [str(p) for p in tmp_path.iterdir() if p.is_dir()] == [said[0]]


@pytest.mark.model
def test_real_activations_equal_to_a_full_cache_whose_dropped_tokens_are_hidden(demo_model):
    model, tokenizer = demo_model
    text = (tiny.ROOT / "demo" / "constitution.txt").read_text()[:4000]
    inputs = {"input_ids": tokenizer(text, return_tensors="pt")["input_ids"]}
    steps = [torch.tensor([[i]]) for i in (260, 1024, 905)]
    evicted, judged, _ = evicted_and_judged(model, inputs, steps, budget=0.1)
    assert (evicted.log_softmax(-1) - judged.log_softmax(-1)).abs().max() < 5e-4


@pytest.mark.model
def test_implementations_keep_the_same_tokens_on_real_activations(demo_model):
    from decantkv.observation import ObservingCache
    from decantkv.settings import Settings

    model, tokenizer = demo_model
    text = (tiny.ROOT / "demo" / "constitution.txt").read_text()[:3000]
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    overlap = []

    def compare(win):
        exact = decantkv.score(win.q.double(), win.k.double(), win.v.double(), impl="reference", scale=win.scale)
        choice = Settings.parse("dropkv", budget=0.1)
        best = choice.choose(exact, lengths=None).mask(win.kv_len)
        tiled = choice.choose(choice.score(win), lengths=None).mask(win.kv_len)
        overlap.append((best & tiled).sum() / best.sum())

    with torch.no_grad():
        model(ids, **{decantkv.cache.cache_argument(model): ObservingCache(model, compare, rows=8)})
    assert len(overlap) == 30
    assert min(overlap) > 0.99
