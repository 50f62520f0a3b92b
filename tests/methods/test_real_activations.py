"""Every method on the demo model's own activations: tiled float32 against the reference in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decantkv.cache.call_window import window_of
from decantkv.cache.policy import Policy
from decantkv.hf.attention_hook import AttentionCall
from decantkv.hf.model_parts import rotation
from decantkv.methods import METHODS
from decantkv.settings import Settings

LAYERS = (0, 1, 14, 29)
TEXT = "".join(
    f"The gate code of the {place} is {1000 + 37 * i}. "
    for i, place in enumerate(
        ["mill", "harbour", "chapel", "orchard", "quarry", "library", "brewery", "lighthouse"] * 2
    )
)

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def windows(demo_model):
    """A float32 window of 32 queries with everything any method needs, from four layers."""
    from transformers import DynamicCache

    from decantkv.cache.evicting_cache import cache_argument, replace_layers
    from decantkv.hf.attention_hook import Hold

    model, tokenizer = demo_model
    rotate, found = rotation(model), {}

    class Watching(Policy):
        rows = 32

        def decide(self, layer, prompt, call: AttentionCall, seen):
            if layer.layer_idx in LAYERS:
                needs = frozenset({"queries", "W_O"})
                found[layer.layer_idx] = window_of(call, seen, 32, layer.layer_idx, needs=needs, rotate=rotate)
            layer.hold_all(prompt)

    cache = DynamicCache(config=model.config)
    replace_layers(cache, model, Watching())
    hold = Hold(model)
    with torch.no_grad():
        ids = tokenizer(TEXT, return_tensors="pt").input_ids
        model(ids, logits_to_keep=1, **{cache_argument(model): cache})
    hold.close()
    assert sorted(found) == list(LAYERS)
    return [found[layer] for layer in LAYERS]


def exact(win):
    """The same window in float64, for the reference."""
    wide = {name: getattr(win, name).double() for name in ("q", "k", "v", "queries", "output_projection")}
    return replace(win, **wide)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_scores_agree_with_the_reference_in_float64(windows, name):
    method = METHODS[name]()
    for win in windows:
        win = win.last(max(method.window, 1))
        got = method.score(win, impl="torch").double()
        want = method.score(exact(win), impl="reference").double()
        assert bool(got.isfinite().all())
        free = slice(method.sinks, win.kv_len - method.window)
        error = (got - want)[..., free].abs()
        scale = want[..., free].abs()
        # the contract of the scores: 1 % of each, or rounding of the layer's own sums
        assert bool((error <= 0.01 * scale + 1e-5 * scale.amax(-1, keepdim=True)).all()), (win.layer_idx, name)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_kept_sets_agree_with_the_reference_in_float64(windows, name):
    settings = Settings.parse(name, budget=0.4)
    differing = kept = 0
    for place, win in enumerate(windows):
        win = win.last(settings.rows)
        masks = []
        for impl, seen in (("torch", win), ("reference", exact(win))):
            masks.append(replace(settings, impl=impl).keep(seen, layer=(place, len(windows))).mask(win.kv_len))
        assert int(masks[0].sum()) == int(masks[1].sum())
        differing += int((masks[0] & ~masks[1]).sum())
        kept += int(masks[0].sum())
    assert differing <= 0.005 * kept  # a token at the edge of a budget may fall either way


def test_methods_choose_differently(windows):
    win = windows[2]
    names = ("dropkv", "snapkv:shared", "knorm", "andpro", "h2o", "expected-attention", "random")
    settings = [Settings.parse(name, budget=0.4) for name in names]
    kept = {name: own.keep(win.last(own.rows)).mask(win.kv_len) for name, own in zip(names, settings, strict=True)}
    for a in kept:
        for b in kept:
            assert a == b or not torch.equal(kept[a], kept[b]), (a, b)
