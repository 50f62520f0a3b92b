"""Saving, loading, forking and joining evicted caches."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

import decantkv
from decantkv.cache import files
from decantkv.cache.evicting_cache import cache_argument
from decantkv.selection.allocation import Global
from tests.support import tiny
from tests.support.judge import evicted_and_judged, logits_with

ROWS = [tiny.prompt(90, seed=1), tiny.prompt(35, seed=2)]
SETTINGS = {
    "uniform": {"budget": 0.2, "sinks": 1, "protect": [(3, 6)]},
    "ada": {"budget": 0.3, "allocation": "ada"},
    "global": {"budget": 0.3, "allocation": Global(0.2), "weigh": "block"},
    "snapkv": {"method": "snapkv", "budget": 20, "window": 8},
    "whole": {"budget": 1.0},
}


def step(model, cache, mask, token=7):
    """Logits [B, V] of one more token; `mask` [B, seen] grows by it."""
    mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    ids = torch.full((mask.shape[0], 1), token)
    with torch.no_grad():
        out = model(
            ids, attention_mask=mask, position_ids=mask.sum(-1, keepdim=True) - 1, **{cache_argument(model): cache}
        )
    return out.logits[:, -1], mask


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("decoded", [0, 2])
def test_a_loaded_cache_goes_on_like_the_saved_one(tmp_path, name, decoded):
    model, inputs = tiny.llama(), tiny.left_padded(ROWS)
    cache = decantkv.EvictingCache(model, **SETTINGS[name])
    logits_with(model, cache, inputs, [])
    mask = inputs["attention_mask"]
    for _ in range(decoded):
        _, mask = step(model, cache, mask)
    cache.save(tmp_path / "c.safetensors", prompt=inputs["input_ids"])
    loaded = decantkv.EvictingCache.load(tmp_path / "c.safetensors", model, prompt=inputs["input_ids"])
    assert loaded.settings == cache.settings
    assert loaded.get_seq_length() == cache.get_seq_length() == 90 + decoded
    for _ in range(3):
        (ours, _), (theirs, mask) = step(model, loaded, mask), step(model, cache, mask)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    if name != "whole":
        with pytest.raises(ValueError, match="expected to remove at most"):
            loaded.crop(-decoded - 4)


def test_other_models_prompts_and_files_are_refused(tmp_path):
    model, ids, path = tiny.llama(), tiny.prompt(60), tmp_path / "c.safetensors"
    cache = decantkv.EvictingCache(model, budget=0.2)
    logits_with(model, cache, {"input_ids": ids}, [])
    cache.save(path, prompt=ids)
    decantkv.EvictingCache.load(path, tiny.llama())  # the same weights in another object
    with pytest.raises(ValueError, match="model: expected the one whose cache"):
        decantkv.EvictingCache.load(path, tiny.llama(seed=1))
    with pytest.raises(ValueError, match="model: expected the one whose cache"):
        decantkv.EvictingCache.load(path, tiny.llama().to(torch.float64))
    with pytest.raises(ValueError, match="prompt: expected the one"):
        decantkv.EvictingCache.load(path, model, prompt=tiny.prompt(60, seed=1))
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    (tmp_path / "flipped.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="changed since"):
        decantkv.EvictingCache.load(tmp_path / "flipped.safetensors", model)
    marks = {"decantkv": files.read(path)[0]["prompt"], "digest": ""}
    save_file(load_file(path), tmp_path / "forged.safetensors", metadata=marks)
    with pytest.raises(ValueError, match="changed since"):
        decantkv.EvictingCache.load(tmp_path / "forged.safetensors", model)
    save_file({"x": torch.zeros(3)}, tmp_path / "other.safetensors")
    for other in ("other.safetensors", "none.safetensors"):
        with pytest.raises(ValueError, match="path: expected a cache that was saved"):
            decantkv.EvictingCache.load(tmp_path / other, model)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="path: expected a cache that was saved"):
        decantkv.EvictingCache.load(path, model)


@pytest.mark.parametrize("moment", ["save", "fsync", "replace"])
def test_an_interrupted_save_leaves_the_old_file_whole(tmp_path, monkeypatch, moment):
    model, path = tiny.llama(), tmp_path / "c.safetensors"
    cache = decantkv.EvictingCache(model, budget=0.2)
    logits_with(model, cache, {"input_ids": tiny.prompt(60)}, [])
    cache.save(path)
    before = path.read_bytes()

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(files if moment == "save" else os, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "nothing half-written lies about"


def test_a_waiting_prompt_and_a_foreign_method_are_not_saved(tmp_path):
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Mine(decantkv.DropKV):
        pass

    model, ids = tiny.llama(), tiny.prompt(60)
    cache = decantkv.EvictingCache(model, budget=0.2)
    with torch.no_grad(), decantkv.cache.evicting_cache.deferred(cache):
        model(ids, **{cache_argument(model): cache})
        with pytest.raises(ValueError, match="read to its end"):
            cache.save(tmp_path / "c")
    with pytest.raises(ValueError, match="got Mine"):
        decantkv.EvictingCache(model, Mine(), budget=0.2).save(tmp_path / "c")


@pytest.mark.parametrize("name", SETTINGS)
def test_joined_groups_go_on_like_each_row_alone(name):
    model, settings = tiny.llama(), SETTINGS[name]
    rows = [*ROWS, tiny.prompt(70, seed=3)]
    groups = [[rows[0], rows[1]], [rows[2]]]
    caches = []
    for group in groups:
        caches.append(decantkv.EvictingCache(model, **settings))
        logits_with(model, caches[-1], tiny.left_padded(group), [])
    joined = decantkv.EvictingCache.cat(caches)
    mask = tiny.left_padded(rows)["attention_mask"]
    together = []
    for token in (7, 11, 3):
        logits, mask = step(model, joined, mask, token)
        together.append(logits)
    for i, row in enumerate(rows):
        steps = [torch.tensor([[t]]) for t in (7, 11, 3)]
        alone = logits_with(model, decantkv.EvictingCache(model, **settings), {"input_ids": row}, steps)
        torch.testing.assert_close(torch.stack([x[i] for x in together]), alone[0, 1:], rtol=0, atol=2e-5)
    assert caches[0].layers[0].logical == 90, "the parts are left as they were"


def test_joining_after_new_tokens_equals_the_judge():
    model, ids = tiny.llama(), [tiny.prompt(80, seed=1), tiny.prompt(80, seed=2)]
    caches = [decantkv.EvictingCache(model, budget=0.2) for _ in ids]
    for cache, row in zip(caches, ids, strict=True):
        logits_with(model, cache, {"input_ids": row}, [torch.tensor([[5]]), torch.tensor([[6]])])
    joined = decantkv.EvictingCache.cat(caches)
    logits, _ = step(model, joined, torch.ones(2, 82, dtype=torch.long))
    for i, row in enumerate(ids):
        steps = [torch.tensor([[t]]) for t in (5, 6, 7)]
        _, judged, _ = evicted_and_judged(model, {"input_ids": row}, steps, budget=0.2)
        torch.testing.assert_close(logits[i], judged[0, -1], rtol=0, atol=1e-5)
    joined.crop(-3)  # all that came after the prompts, before the join and since
    with pytest.raises(ValueError, match="crop: expected to remove at most the 0 tokens"):
        joined.crop(-1)


def test_what_cannot_be_joined_is_refused():
    model = tiny.llama()
    ready = decantkv.EvictingCache(model, budget=0.2)
    logits_with(model, ready, {"input_ids": tiny.prompt(60)}, [])
    with pytest.raises(ValueError, match="at least one"):
        decantkv.EvictingCache.cat([])
    with pytest.raises(ValueError, match="read a prompt to its end"):
        decantkv.EvictingCache.cat([ready, decantkv.EvictingCache(model, budget=0.2)])
    twin = tiny.llama()
    for other in (decantkv.EvictingCache(model, budget=0.3), decantkv.EvictingCache(twin, budget=0.2)):
        with pytest.raises(ValueError, match="one model and one setting"):
            decantkv.EvictingCache.cat([ready, other])


@pytest.mark.parametrize("name", ["uniform", "ada"])
def test_forks_do_not_see_each_other(name):
    model, ids = tiny.llama(), tiny.prompt(80)
    cache = decantkv.EvictingCache(model, **SETTINGS[name])
    logits_with(model, cache, {"input_ids": ids}, [torch.tensor([[4]])])
    mask = torch.ones(1, 81, dtype=torch.long)
    forks = [copy.deepcopy(cache) for _ in range(2)]
    said = [step(model, fork, mask, token)[0] for fork, token in zip(forks, (5, 50), strict=True)]
    assert not torch.equal(*said)
    for token, logits in zip((5, 50), said, strict=True):
        _, judged, _ = evicted_and_judged(
            model, {"input_ids": ids}, [torch.tensor([[4]]), torch.tensor([[token]])], **SETTINGS[name]
        )
        torch.testing.assert_close(logits[0], judged[0, -1], rtol=0, atol=1e-5)


def saved(path, model=None, **options):
    model = model or tiny.llama()
    cache = decantkv.EvictingCache(model, **{"budget": 0.3, **options})
    logits_with(model, cache, {"input_ids": tiny.prompt(60)}, [])
    cache.save(path)
    return model, cache


def test_files_have_the_modes_that_others_have_and_links_stay_links(tmp_path):
    before = os.umask(0o022)
    try:
        path, link = tmp_path / "c", tmp_path / "link"
        _, cache = saved(path)
        assert path.stat().st_mode & 0o777 == 0o644
        path.chmod(0o664)
        link.symlink_to(path)
        path.write_bytes(b"old")
        cache.save(link)
        assert link.is_symlink()
        assert path.stat().st_size > 1000
        assert path.stat().st_mode & 0o777 == 0o664
        (tmp_path / ".decantkv-0123").write_bytes(b"left by a writer that was killed")
        cache.save(tmp_path / ("x" * 255))
        assert sorted(len(p.name) for p in tmp_path.iterdir()) == [1, 4, 255]
    finally:
        os.umask(before)
    for wrong in (tmp_path / "none" / "c", tmp_path, tmp_path / ("x" * 256)):
        with pytest.raises(ValueError, match="path: expected") as error:
            cache.save(wrong)
        assert ".decantkv-" not in str(error.value)


@pytest.mark.parametrize("options", [{}, {"allocation": "shared"}, {"allocation": "ada"}], ids=str)
def test_one_head_and_one_row_are_saved(tmp_path, options):
    model, cache = saved(tmp_path / "c", tiny.llama(num_key_value_heads=1), **options)
    loaded = decantkv.EvictingCache.load(tmp_path / "c", model)
    assert torch.equal(loaded.layers[0].keys, cache.layers[0].keys)


def forge(path, change):
    """A file whose digest fits what `change` made of its contents."""
    import json

    about, tensors = files.read(path)
    change(about, tensors)
    text = json.dumps(about)
    save_file(tensors, path, metadata={"decantkv": text, "digest": files._digest(text, tensors)})


FORGERIES = {
    "negative length": lambda a, t: [layer.update(logical=-5) for layer in a["layers"]],
    "length as text": lambda a, t: a["layers"][0].update(logical="60"),
    "unequal lengths": lambda a, t: a["layers"][1].update(logical=61),
    "fewer layers": lambda a, t: a["layers"].pop(),
    "no layers": lambda a, t: a.pop("layers"),
    "settings": lambda a, t: a.update(settings=[]),
    "method": lambda a, t: a["settings"]["method"].update(name="none"),
    "bounds": lambda a, t: a["bounds"].update(every=-1),
    "unknown bound": lambda a, t: a["bounds"].update(often=1),
    "model": lambda a, t: a["model"].pop("weights"),
    "no keys": lambda a, t: t.pop("0.store.keys"),
    "no counts": lambda a, t: t.pop("1.kept.counts"),
    "positions": lambda a, t: t["0.kept.indices"].add_(10**9),
    "counts": lambda a, t: t["0.kept.counts"].add_(1),
    "values of another length": lambda a, t: t.update({"0.store.values": t["0.store.values"][..., 1:, :].contiguous()}),
    "rows": lambda a, t: a["layers"][0].update(rows=[1, 2, 3]),
    "format": lambda a, t: a.pop("format"),
    "unknown tensor": lambda a, t: t.update({"9.keys": torch.ones(1)}),
}
LANES = {
    "overlap": lambda a, t: t["0.store.starts"].zero_(),
    "before the storage": lambda a, t: t["0.store.starts"].sub_(1),
    "batch of none": lambda a, t: t["0.store.numbers"][:1].zero_(),
    "negative room": lambda a, t: t["0.store.numbers"][1:2].sub_(5),
    "lens": lambda a, t: t["0.store.lens"].neg_(),
}


@pytest.mark.parametrize("name", [*FORGERIES, *LANES])
def test_forged_files_are_refused_by_a_value_error(tmp_path, name):
    model, _ = saved(tmp_path / "c", **({"allocation": "ada"} if name in LANES else {"decode": "model"}))
    decantkv.EvictingCache.load(tmp_path / "c", model)
    forge(tmp_path / "c", (FORGERIES | LANES)[name])
    with pytest.raises(ValueError, match="expected"):
        decantkv.EvictingCache.load(tmp_path / "c", model)


def test_a_files_mark_is_read_before_its_tensors(tmp_path, monkeypatch):
    save_file({"x": torch.zeros(3)}, tmp_path / "other")
    monkeypatch.setattr(files, "load", None)
    with pytest.raises(ValueError, match=r"path: expected a cache that was saved, .* another safetensors file"):
        files.read(tmp_path / "other")
