"""Rehearsals: the prompt's keys are scored by tokens that are run over it and forgotten."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import decantkv
from decantkv import EvictingCache
from decantkv.cache.evicting_cache import cache_argument, deferred
from decantkv.scoring.rehearsal import Rehearsal
from tests.support import tiny
from tests.support.judge import evicted_and_judged


def full_pass(model, ids):
    """Keys, values and queries of every layer, by a plain forward over prompt and rehearsal together."""
    seen = []

    def hook(module, args, kwargs, output):
        seen.append(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    handles = [layer.self_attn.register_forward_hook(hook, with_kwargs=True) for layer in model.model.layers]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return seen


def deleted_costs(model, prompt, passages):
    """[layers][H, N] Σ over queries of ‖output with and without the key‖², every softmax computed anew without it."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    n, totals = prompt.shape[1], None
    for passage in passages:
        ids = torch.cat([prompt, passage], 1)
        positions = torch.arange(ids.shape[1])[None]
        costs = []
        for layer, hidden in zip(model.model.layers, full_pass(model, ids), strict=True):
            attention = layer.self_attn
            shape = (1, ids.shape[1], -1, attention.head_dim)
            q = attention.q_proj(hidden).view(shape).transpose(1, 2)
            k = attention.k_proj(hidden).view(shape).transpose(1, 2)
            v = attention.v_proj(hidden).view(shape).transpose(1, 2).double()
            cos, sin = model.model.rotary_emb(hidden, positions)
            q, k = (x.double() for x in apply_rotary_pos_emb(q, k, cos, sin))
            heads, group = k.shape[1], q.shape[1] // k.shape[1]
            cost = torch.zeros(heads, n, dtype=torch.float64)
            for head in range(q.shape[1]):
                logits = q[0, head, n:] @ k[0, head // group].T * attention.head_dim**-0.5
                logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(n + 1), -torch.inf)
                whole = logits.softmax(-1) @ v[0, head // group]
                for j in range(n):
                    less = logits.clone()
                    less[:, j] = -torch.inf
                    shift = less.softmax(-1) @ v[0, head // group] - whole
                    cost[head // group, j] += shift.square().sum() / group
            costs.append(cost)
        totals = costs if totals is None else [a + b for a, b in zip(totals, costs, strict=True)]
    return totals


@pytest.mark.parametrize("decode", ["model", "own"])
@pytest.mark.parametrize("rehearsal", ["replay", "questions", "replay+window"])
def test_what_stays_is_what_deletion_under_the_rehearsals_queries_would_cost_most(rehearsal, decode):
    model, prompt = tiny.llama(), tiny.prompt(40, seed=3)
    questions = (tuple(tiny.prompt(5, seed=8)[0].tolist()), tuple(tiny.prompt(9, seed=9)[0].tolist()))
    given = {
        "replay": Rehearsal(replay=True, chunk=16, quote=3, lead=(5, 6)),
        "replay+window": Rehearsal(replay=True, chunk=64, window=True),
        "questions": Rehearsal(questions=questions),
    }[rehearsal]
    lead = torch.tensor([[5, 6]])
    passages = {
        "replay": [torch.cat([lead, prompt[:, max(0, s - 3) : s + 16]], 1) for s in (0, 16, 32)],
        "replay+window": [prompt],
        "questions": [torch.tensor([ids]) for ids in questions],
    }[rehearsal]
    with decantkv.attach(model, budget=0.3, rehearsal=given, allocation="uniform", weigh="value", decode=decode) as run:
        out = model.generate(prompt, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    cache = out[cache_argument(model)] if cache_argument(model) in out else out["past_key_values"]
    exact = deleted_costs(model, prompt, passages)
    if rehearsal == "replay+window":
        own = deleted_costs(model, prompt[:, :32], [prompt[:, 32:]])
        exact = [torch.cat([a[:, :32] / 40 + b / 8, a[:, 32:]], 1) for a, b in zip(exact, own, strict=True)]
    for layer, cost in zip(cache.layers, exact, strict=True):
        free = cost.clone()
        free[:, :4] = free[:, 32:] = torch.inf
        best = torch.sort(free.topk(12, dim=-1).indices, -1).values
        assert torch.equal(layer.kept.indices[0], best)
    assert "rehearsal" in str(run.report().to_json())


@pytest.mark.parametrize("decode", ["model", "own"])
@pytest.mark.parametrize("allocation", ["uniform", "ada", "global"])
@pytest.mark.parametrize("padded", [False, True])
def test_answers_equal_the_full_cache_with_the_dropped_tokens_hidden(padded, allocation, decode):
    model = tiny.llama()
    rows = [tiny.prompt(50, seed=1), tiny.prompt(31, seed=2)]
    inputs = tiny.left_padded(rows) if padded else {"input_ids": tiny.prompt(50, seed=1, batch=2)}
    steps = [tiny.prompt(3, seed=5, batch=2), tiny.prompt(1, seed=6, batch=2)]
    made, judged, _ = evicted_and_judged(
        model, inputs, steps, method="dropkv", budget=0.4, rehearsal=Rehearsal(replay=True, chunk=20, anchors=0.2),
        allocation=allocation, decode=decode,
    )  # fmt: skip
    torch.testing.assert_close(made, judged, rtol=1e-4, atol=1e-5)


def test_a_padded_rows_rehearsal_is_that_of_the_row_alone():
    model, rows = tiny.llama(), [tiny.prompt(50, seed=1), tiny.prompt(31, seed=2)]
    rehearsal = Rehearsal(replay=True, chunk=14, anchors=0.2, questions=((3, 4),))
    name = cache_argument(model)
    together = EvictingCache(model, budget=12, rehearsal=rehearsal, allocation="uniform")
    inputs = tiny.left_padded(rows)
    with torch.no_grad():
        model(**inputs, position_ids=(inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0), **{name: together})
    for i, row in enumerate(rows):
        alone = EvictingCache(model, budget=12, rehearsal=rehearsal, allocation="uniform")
        with torch.no_grad():
            model(row, **{name: alone})
        for one, other in zip(together.layers, alone.layers, strict=True):
            assert torch.equal(one.kept.indices[i : i + 1] - (50 - row.shape[1]), other.kept.indices)


def test_a_rehearsal_leaves_no_trace():
    model, prompt = tiny.llama(), tiny.prompt(40)
    name, state = cache_argument(model), torch.get_rng_state()
    with torch.no_grad():
        plain = model(prompt, **{name: DynamicCache(config=model.config)}).logits
        cache = EvictingCache(model, budget=1.0, rehearsal="replay+anchors")
        assert torch.equal(model(prompt, **{name: cache}).logits, plain)
        assert cache.get_seq_length() == 40
        assert {layer.stored for layer in cache.layers} == {40}
    assert torch.equal(torch.get_rng_state(), state)


def test_a_cache_is_scored_with_given_tokens_and_stays_whole_after_an_interrupt(monkeypatch):
    model, prompt, question = tiny.llama(), tiny.prompt(40), tiny.prompt(6, seed=4)
    name = cache_argument(model)
    by_setting = EvictingCache(model, budget=0.3, rehearsal=Rehearsal(questions=(question,)))
    by_hand = EvictingCache(model, budget=0.3, allocation=by_setting.settings.allocation, pool="none", sinks=4,
                            weigh=by_setting.settings.method.weigh)  # fmt: skip
    with torch.no_grad():
        model(prompt, **{name: by_setting})
        with deferred(by_hand):
            model(prompt, **{name: by_hand})

            def stop(*args, **kwargs):
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(type(model.model.layers[1].mlp), "forward", stop)
                with pytest.raises(KeyboardInterrupt):
                    by_hand.rehearse(question)
            assert by_hand.get_seq_length() == 40
            by_hand.rehearse(question)
    for one, other in zip(by_setting.layers, by_hand.layers, strict=True):
        assert torch.equal(one.kept.indices, other.kept.indices)


@torch.no_grad()
def test_a_bare_forward_that_attach_gives_a_cache_is_rehearsed():
    model, ids = tiny.llama(), tiny.prompt(80)
    kept = []
    for given in (False, True):
        with decantkv.attach(model, budget=0.3, rehearsal="replay", allocation="uniform") as run:
            cache = {cache_argument(model): run.new_cache()} if given else {}
            kept.append(model(ids, use_cache=True, **cache)[cache_argument(model)].layers)
    for bare, told in zip(*kept, strict=True):
        assert torch.equal(bare.kept.indices, told.kept.indices)
