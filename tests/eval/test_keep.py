"""All layers as one batch, and one computation for all who ask for it, keep what each layer and method keeps alone."""

import dataclasses
import os

import pytest
import torch

from decantkv.lab.eval.engine import keep
from decantkv.lab.eval.engine.keep import choose, score, score_key
from decantkv.lab.eval.engine.policy import parse_policies
from decantkv.lab.eval.engine.prompt import Reader, Windows
from decantkv.lab.eval.presets import ALL, VARIANTS
from decantkv.methods.position import Random

OTHERS = "tova,andpro-chunks,pyramidkv,dropkv[allocation=layer],criticalkv[base=dropkv],caote,expected-attention"
LENGTH, CUT = 160, 120


def settings_of(budget):
    labels = dict.fromkeys(p.label for text in (ALL, VARIANTS, OTHERS) for p in parse_policies(text))
    policies = [p for p in parse_policies(",".join(labels)) if p.kind == "evict"]
    return {policy.label: policy.settings(budget) for policy in policies}


@pytest.fixture(scope="module")
def windows(model):
    every = settings_of("0.4").values()
    needs = frozenset(need for each in every for need in each.method.needs)
    reader = Reader(model, rows=max(each.rows for each in every), needs=needs)
    ids = torch.randint(1, model.config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(7)).tolist()
    return dict(reader.read(ids, [CUT]))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("cut", [CUT, LENGTH])
@pytest.mark.parametrize("label", settings_of("0.4"))
def test_layers_together_keep_what_they_keep_one_by_one(windows, label, cut, monkeypatch):
    here, alone = windows[cut], list(windows[cut])
    assert isinstance(here, Windows)
    for budget in ("0.4", "0.6"):
        settings = settings_of(budget)[label]
        mine, theirs = score(here, settings), score(alone, settings)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
        monkeypatch.setattr(keep, "TOGETHER_BYTES", 1)  # a layer at a time
        torch.testing.assert_close(score(here, settings), theirs, rtol=1e-4, atol=1e-6)
        monkeypatch.undo()
        chosen, expected = choose(here, settings, mine), choose(alone, settings, theirs)
        assert torch.equal(chosen.indices, expected.indices)
        assert torch.equal(chosen.counts, expected.counts)


def test_equal_keys_are_equal_scores_and_the_table_computes_few(windows):
    by_key, asked = {}, 0
    for settings in settings_of("0.4").values():
        own = score(windows[LENGTH], settings)
        asked += 1
        assert torch.equal(by_key.setdefault(score_key(settings), own), own)
    assert len(by_key) < 0.7 * asked
    table = [p.settings("0.4") for p in parse_policies(ALL) if p.kind == "evict"]
    assert len({score_key(each) for each in table}) == 14  # of 19


def test_a_method_of_ones_own_is_scored_layer_by_layer(windows):
    class Louder(keep.DropKV):
        def score(self, win, *, impl="auto"):
            return super().score(win, impl=impl) + win.layer_idx

    settings = settings_of("0.4")["dropkv"]
    own = type(settings)(Louder(), settings.budget)
    assert score_key(own) != score_key(settings)
    gained = score(windows[LENGTH], own) - score(windows[LENGTH], settings)
    torch.testing.assert_close(gained.amax((1, 2)), torch.arange(3.0), atol=1e-3, rtol=0)


def test_noise_differs_by_layer(windows):
    settings = settings_of("0.4")["random"]
    assert type(settings.method) is Random
    scores = score(windows[LENGTH], settings)
    assert not torch.equal(scores[0], scores[1])


@pytest.mark.interpreter
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("label", ["dropkv", "snapkv", "andpro", "dropkv[reduce=max]"])
def test_the_kernels_score_layers_together_as_one_by_one(windows, label):
    settings = dataclasses.replace(settings_of("0.4")[label], impl="triton")
    for cut, here in windows.items():
        assert here[0].k.is_contiguous() == (cut == LENGTH)  # earlier than the end a window is a view with gaps
        mine, theirs = score(here, settings), score(list(here), settings)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
