"""One value of every setting is in force, wherever it is read."""

from __future__ import annotations

import pytest
import torch

import decantkv
from decantkv.cache.evicting_cache import cache_argument
from decantkv.cache.files import settings_as_dict, settings_from_dict
from decantkv.methods import ExpectedAttention
from decantkv.settings import Settings
from tests.support import tiny


@pytest.mark.parametrize("method", ["streaming", "expected-attention", "dropkv", "andpro", ExpectedAttention(sinks=3)])
@pytest.mark.parametrize("sinks", [0, 8, None])
def test_sinks_have_one_value_in_settings_method_report_and_file(method, sinks):
    settings = Settings.parse(method, budget=60, sinks=sinks)
    wanted = settings.method.sinks if sinks is None else sinks
    assert settings.sinks == settings.method.sinks == wanted
    assert f"sinks={wanted}" in settings.method.describe()
    assert settings_from_dict(settings_as_dict(settings)) == settings
    run = decantkv.attach(tiny.llama(), method, budget=60, sinks=sinks)
    run.detach()
    assert f"sinks={wanted}" in str(run.report())


def test_expected_attention_without_sinks_scores_the_first_tokens_too():
    model, ids = tiny.llama(num_hidden_layers=1), tiny.prompt(60)
    cache = decantkv.EvictingCache(model, "expected-attention", budget=0.5, sinks=0)
    with torch.no_grad():
        model(ids, **{cache_argument(model): cache})
    own = decantkv.EvictingCache(model, ExpectedAttention(sinks=0), budget=0.5)
    with torch.no_grad():
        model(ids, **{cache_argument(model): own})
    assert torch.equal(cache.layers[0].kept.indices, own.layers[0].kept.indices)


def test_attach_takes_settings_that_were_parsed_before():
    model, prompt = tiny.llama(), tiny.prompt(30)
    settings = Settings.parse("snapkv", budget=0.5, window=4, allocation="ada")
    kept = []
    for given in ({"settings": settings}, {"method": "snapkv", "budget": 0.5, "window": 4, "allocation": "ada"}):
        with torch.no_grad(), decantkv.attach(model, **given) as run:
            cache = run.new_cache()
            model(prompt, **{cache_argument(model): cache})
        kept.append([layer.kept.indices for layer in cache.layers])
    assert all(torch.equal(one, other) for one, other in zip(*kept, strict=True))
    with pytest.raises(TypeError, match="settings: expected none beside budget"):
        decantkv.attach(model, settings=settings, budget=0.5)
    with pytest.raises(TypeError, match="budget: expected what is kept"):
        decantkv.attach(model)
