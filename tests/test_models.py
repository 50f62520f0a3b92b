"""Loading, and the demo model itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import transformers

import decantkv
import decantkv.hf.loading
from decantkv.hf.loading import cache_folder, convert_gguf
from tests.support import tiny
from tests.support.judge import evicted_and_judged


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
    code = "import sys; from decantkv.hf.loading import convert_gguf; print(convert_gguf(sys.argv[1]))"
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
    from decantkv.cache.watching import ObservingCache
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
        model(ids, **{decantkv.cache.evicting_cache.cache_argument(model): ObservingCache(model, compare, rows=8)})
    assert len(overlap) == 30
    assert min(overlap) > 0.99


# -- checkpoints that are not whole


def folder_of(model, path, change=lambda tensors: tensors):
    """A model folder whose weights `change` has touched."""
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(path)
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    weights = path / "model.safetensors"
    save_file(change(load_file(weights)), weights, metadata={"format": "pt"})
    return path


def renamed(tensors):
    return {name.replace("layers.1.mlp.up_proj", "layers.1.mlp.up_prof"): x for name, x in tensors.items()}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda t: {n: x for n, x in t.items() if "1.self_attn.q_proj" not in n},
            "lack model.layers.1.self_attn.q_proj",
        ),
        (renamed, "lack model.layers.1.mlp.up_proj.weight"),
        (lambda t: {**t, "model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, "q_proj.bias"),
        (lambda t: {**t, "model.norm.weight": torch.ones(32)}, "norm.weight|mismatch"),
    ],
    ids=["missing", "renamed", "left over", "another shape"],
)
def test_checkpoints_that_are_not_whole_are_refused(tmp_path, change, reason):
    decantkv.hf.loading.load(folder_of(tiny.llama(), tmp_path / "whole"))
    with pytest.raises(ValueError, match=f"model: expected .*({reason})") as error:
        decantkv.hf.loading.load(folder_of(tiny.llama(), tmp_path / "other", change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("damage", ["cut", "noise", "empty", "config", "nested"])
def test_damaged_folders_give_one_line(tmp_path, damage):
    path = folder_of(tiny.llama(), tmp_path / "m")
    weights = path / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage in ("noise", "empty"):
        weights.write_bytes(b"\xff" * 400 if damage == "noise" else b"")
    else:
        (path / "config.json").write_text("{" if damage == "config" else "[" * 100_000)
    with pytest.raises(ValueError, match="model: expected a model id, a model folder") as error:
        decantkv.hf.loading.load(path)
    assert "\n" not in str(error.value)


def gguf_file(path, *, blocks=2, change=lambda name, data: (name, data), **extra):
    """A tiny llama as a GGUF file."""
    import numpy as np

    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), "llama")
    for add, value in (
        (writer.add_context_length, 64), (writer.add_embedding_length, 32), (writer.add_block_count, blocks),
        (writer.add_feed_forward_length, 48), (writer.add_head_count, 4), (writer.add_head_count_kv, 2),
        (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_rope_freq_base, 10000.0), (writer.add_vocab_size, 259),
    ):  # fmt: skip
        add(value)
    words = [f"w{i}" for i in range(256)] + ["<unk>", "<s>", "</s>"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([1] * len(words))
    shapes = {"token_embd": (259, 32), "output_norm": (32,), "output": (259, 32)}
    for i in range(2):
        shapes |= {f"blk.{i}.attn_norm": (32,), f"blk.{i}.ffn_norm": (32,), f"blk.{i}.attn_q": (32, 32)}
        shapes |= {f"blk.{i}.attn_k": (16, 32), f"blk.{i}.attn_v": (16, 32), f"blk.{i}.attn_output": (32, 32)}
        shapes |= {f"blk.{i}.ffn_gate": (48, 32), f"blk.{i}.ffn_up": (48, 32), f"blk.{i}.ffn_down": (32, 48)}
    random = np.random.default_rng(0)
    for name, shape in (shapes | extra).items():
        changed = change(f"{name}.weight", random.standard_normal(shape, dtype=np.float32))
        if changed is not None:
            writer.add_tensor(*changed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_files_that_are_not_whole_leave_no_trace(tmp_path, monkeypatch):
    if transformers.__version__ < "5":
        pytest.importorskip("google.protobuf", reason="transformers 4 reads a GGUF's tokenizer through it")
    monkeypatch.setenv("DECANTKV_CACHE", str(tmp_path / "cache"))
    whole = gguf_file(tmp_path / "whole.gguf")
    folder = convert_gguf(whole)
    assert (folder / "model.safetensors").is_file()
    before = sorted(p.name for p in folder.parent.iterdir())
    data = whole.read_bytes()
    files = [tmp_path / f"{cut}.gguf" for cut in (4, 20, 69, 200, len(data) // 2, len(data) - 64)]
    for file in files:
        file.write_bytes(data[: int(file.stem)])
    header = tmp_path / "header.gguf"  # 69 bytes that promise the default model of 7 billion weights
    header.write_bytes(
        b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
        + (20).to_bytes(8, "little") + b"general.architecture" + (8).to_bytes(4, "little")
        + (5).to_bytes(8, "little") + b"llama"
    )  # fmt: skip
    assert header.stat().st_size == 69
    files += [
        header,
        gguf_file(tmp_path / "lacks.gguf", change=lambda n, x: None if n == "blk.1.ffn_up.weight" else (n, x)),
        gguf_file(tmp_path / "renamed.gguf", change=lambda n, x: (n.replace("1.ffn_up", "1.ffn_xx"), x)),
        gguf_file(tmp_path / "more.gguf", **{"blk.1.attn_q_norm": (32,)}),
        gguf_file(tmp_path / "promises.gguf", blocks=200_000),
    ]
    for file in files:
        with pytest.raises(ValueError, match=f"^model: expected .*{file.name}") as error:
            decantkv.hf.loading.load(file)
        assert "\n" not in str(error.value)
    assert sorted(p.name for p in folder.parent.iterdir()) == before
