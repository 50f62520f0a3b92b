"""Layers at once, and one computation for all who ask for it, keep what a cache keeps layer by layer."""

import dataclasses

import pytest
import torch

from decantkv.cache.chunked_reading import evicting_layers
from decantkv.lab.eval.engine.policy import parse_policies
from decantkv.lab.eval.engine.reading import Reader, score_key
from decantkv.lab.eval.presets import ALL, VARIANTS
from decantkv.methods.dropkv import DropKV
from decantkv.methods.position import Random

OTHERS = (
    "tova,andpro-chunks,pyramidkv,dropkv[allocation=layer],dropkv[allocation=global],criticalkv[base=dropkv],caote,"
    "expected-attention,streaming:paper,dropkv[allocation=shared],dropkv[allocation=heads]"
)
LENGTH, CUT = 160, 120


def settings_of(budget):
    labels = dict.fromkeys(p.label for text in (ALL, VARIANTS, OTHERS) for p in parse_policies(text))
    policies = [p for p in parse_policies(",".join(labels)) if p.kind == "evict"]
    return {policy.label: policy.settings(budget) for policy in policies}


@pytest.fixture(scope="module")
def reader(model):
    every = settings_of("0.4").values()
    needs = frozenset(need for each in every for need in each.method.needs)
    return Reader(model, rows=max(each.rows for each in every), needs=needs)


@pytest.fixture(scope="module")
def cuts(model, reader):
    ids = torch.randint(1, model.config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(7)).tolist()
    for cut in reader.read(ids, [CUT]):
        for settings in settings_of("0.4").values():
            cut.score(settings)
    return reader.reading().cuts


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("length", [CUT, LENGTH])
@pytest.mark.parametrize("label", settings_of("0.4"))
def test_a_copy_is_what_a_cache_keeps_layer_by_layer(cuts, label, length):
    for budget in ("0.4", "0.6"):
        settings = settings_of(budget)[label]
        copy, cache = cuts[length].copy(settings), cuts[length].evict(settings)
        layers = evicting_layers(cache)
        for mine, layer in zip(copy.stores, layers, strict=True):
            for name in ("lens", "starts", "keys", "values"):
                assert torch.equal(getattr(mine, name), getattr(layer.store, name)), name
        torch.testing.assert_close(copy.kept, torch.cat([layer.kept.counts for layer in layers]).float().mean())


def test_equal_keys_are_equal_scores_and_the_table_computes_few(cuts):
    cut = dataclasses.replace(cuts[LENGTH])
    by_key, asked = {}, 0
    for settings in settings_of("0.4").values():
        cut.scores = {}
        if "queries" in settings.method.needs:  # let go of once they are scored
            continue
        own = cut.score(settings)
        asked += 1
        for one, other in zip(by_key.setdefault(score_key(settings), own), own, strict=True):
            assert torch.equal(one, other)
    assert len(by_key) < 0.8 * asked
    table = [p.settings("0.4") for p in parse_policies(ALL) if p.kind == "evict"]
    assert len({score_key(each) for each in table}) == 15  # of 19


def test_a_method_of_ones_own_is_evicted_by_its_own_scores(cuts):
    """As anyone registers it: nothing about it is known but what it says itself."""

    @dataclasses.dataclass(frozen=True)
    class Louder(DropKV):
        def score(self, win, *, impl="auto"):
            return super().score(win, impl=impl) + win.layer_idx

    @dataclasses.dataclass(frozen=True)
    class First(DropKV):
        def rank(self, pooled, win, n_keep):
            return -torch.arange(pooled.shape[2], device=pooled.device).float().expand_as(pooled)

    settings, cut = settings_of("0.4")["dropkv"], cuts[LENGTH]
    louder, first = (dataclasses.replace(settings, method=method()) for method in (Louder, First))
    assert score_key(louder) != score_key(settings)
    gained = torch.cat(cut.score(louder)) - torch.cat(cut.score(settings))
    torch.testing.assert_close(gained.amax((1, 2)), torch.arange(3.0), atol=1e-3, rtol=0)
    keys = cut.layers[1].keys[0]
    kept = settings.n_keep([LENGTH])[0]
    at = [*range(kept - 8), *range(LENGTH - 8, LENGTH)]  # the window stays
    assert torch.equal(cut.copy(first).stores[1].keys.view(2, kept, -1), keys[:, at])


def test_noise_differs_by_layer(cuts):
    settings = settings_of("0.4")["random"]
    assert type(settings.method) is Random
    scores = cuts[LENGTH].score(settings)
    assert not torch.equal(scores[0], scores[1])
