"""Files of earlier formats still load; tests/data holds one of each kind, written when its format was current."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import decantkv
from decantkv.cache import identity
from decantkv.cache.evicting_cache import cache_argument
from tests.support import tiny
from tests.support.judge import logits_with

DATA = Path(__file__).parent / "data"
BATCH = tiny.left_padded([tiny.prompt(24, seed=1), tiny.prompt(15, seed=2)])
STEPS = [torch.full((2, 1), token) for token in (7, 11, 3, 5, 9)]
CASES = {  # settings, and how many steps the file's cache had gone
    "dense": ({"decode": "model"}, 1),
    "whole": ({"budget": 1.0, "decode": "model"}, 0),
    "rounds": ({"every": 3, "decode": "model"}, 4),
    "lanes": ({"allocation": "ada"}, 2),
    "own": ({"every": 3, "decode": "own"}, 4),
}


def model():
    """The same weights whatever random numbers this torch and this transformers draw."""
    made = tiny.llama(num_hidden_layers=2, hidden_size=16, num_attention_heads=4, intermediate_size=16)
    with torch.no_grad():
        for number, (_, weight) in enumerate(sorted(made.named_parameters())):
            if weight.dim() == 2:
                wave = torch.arange(weight.numel(), dtype=torch.float64).add(1).mul(12.9898 + number).sin()
                weight.copy_((wave * 43758.5453).frac().view_as(weight) * 0.9)
    return made


def cache_after(made, name):
    settings, steps = CASES[name]
    cache = decantkv.EvictingCache(made, "snapkv", window=4, **{"budget": 0.4, **settings})
    return cache, logits_with(made, cache, BATCH, STEPS[:steps])


def write(name):
    """How the files of tests/data were made, under the format of their time."""
    made = model()
    cache_after(made, name)[0].save(DATA / f"format-1-{name}.safetensors", prompt=BATCH["input_ids"])


@pytest.mark.parametrize("name", CASES)
def test_a_file_of_format_1_goes_on_like_a_fresh_cache(monkeypatch, tmp_path, name):
    path, made = DATA / f"format-1-{name}.safetensors", model()
    with safe_open(path, "pt") as file:
        assert '"format": 1' in file.metadata()["decantkv"]
    monkeypatch.setattr(identity, "difference", lambda there, here: None)  # other versions describe models otherwise
    loaded = decantkv.EvictingCache.load(path, made, prompt=BATCH["input_ids"])
    loaded.save(tmp_path / "again")
    again = decantkv.EvictingCache.load(tmp_path / "again", made, prompt=None)
    fresh, _ = cache_after(made, name)
    steps = CASES[name][1]
    for cache in (loaded, again):
        for ours, theirs in zip(cache.layers, fresh.layers, strict=True):
            assert (ours.kept is None) == (theirs.kept is None)
            assert ours.kept is None or torch.equal(ours.kept.indices, theirs.kept.indices)
    expected = further(made, fresh, steps)
    for cache in (loaded, again):
        torch.testing.assert_close(further(made, cache, steps), expected, rtol=0, atol=1e-3)
    with pytest.raises(ValueError, match="expected to remove at most") if name != "whole" else nullcontext():
        loaded.crop(-steps - len(STEPS) - 1)


def further(made, cache, steps):
    """Logits of five more steps: past the next eviction of the answer."""
    mask, out = torch.cat([BATCH["attention_mask"], torch.ones(2, steps).long()], 1), []
    for tokens in STEPS:
        mask = torch.cat([mask, torch.ones_like(tokens)], 1)
        with torch.no_grad():
            out.append(
                made(
                    tokens,
                    attention_mask=mask,
                    position_ids=mask.sum(-1, keepdim=True) - 1,
                    **{cache_argument(made): cache},
                ).logits
            )
    return torch.cat(out, 1)
