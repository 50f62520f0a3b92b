"""What the page shows, against the model's own eager attention and against deletion of the protection."""

import io

import numpy as np
import pytest
import torch
from rich.console import Console

from decantkv.lab.show.collect import collect
from decantkv.lab.show.spans import span_costs
from decantkv.lab.show.terminal import along, tell
from decantkv.scoring.window import make_window
from decantkv.selection.selector import select
from decantkv.settings import Settings

from ..support.tiny import VOCABULARY, llama

TOKENS, ANSWER, WINDOW, GROUP = 90, 6, 8, 4


class Words:
    """A tokenizer that only decodes: token 7 is " w7"."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join(f" w{i}" for i in ids)


@pytest.fixture(scope="module")
def model():
    return llama(attention="eager")


@pytest.fixture(scope="module")
def ids():
    return torch.randint(1, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(2))


def settings(method="dropkv", **options):
    return Settings.parse(method, **{"budget": 0.3, "sinks": 2, "protect": [(20, 25)], **options})


@pytest.fixture(scope="module")
def view(model, ids):
    pieces = [f" w{i}" for i in ids[0].tolist()]
    chosen = [settings(), settings("snapkv:shared")]
    return collect(model, Words(), ids, pieces, chosen, model_name="tiny", max_new_tokens=ANSWER)


def attentions(model, ids):
    """[layers, HQ, queries, keys] softmax weights as the eager model returns them."""
    with torch.no_grad():
        return torch.cat(model(ids, output_attentions=True).attentions).double()


def test_weights_are_the_models_own(view, model, ids):
    p = attentions(model, ids)[:, :, -WINDOW:].unflatten(1, (-1, GROUP)).mean((2, 3))  # [layers, H, N]
    for place in range(3):
        assert np.allclose(view.details[place].weight, p[place].numpy(), atol=1e-5)


def test_the_full_answer_is_the_models(view, model, ids):
    with torch.no_grad():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, do_sample=False)
    assert view.full_answer == Words().decode(output[0, TOKENS:].tolist())


def test_each_method_keeps_its_budget_and_what_is_protected(view):
    for method in view.methods:
        kept = np.stack(method.kept)
        assert (kept.sum(-1) == 27).all()
        assert kept[..., [0, 1, *range(20, 25), *range(TOKENS - WINDOW, TOKENS)]].all()


def test_ranks_order_the_kept(view):
    """Among unprotected tokens of a head every kept one ranks before every dropped one."""
    free = np.ones(TOKENS, dtype=bool)
    free[[0, 1, *range(20, 25), *range(TOKENS - WINDOW, TOKENS)]] = False
    for i, method in enumerate(view.methods):
        for place, kept in enumerate(method.kept):
            rank = view.details[place].ranks[i]
            assert (np.sort(rank, -1) == np.arange(TOKENS)).all()
            for h in range(2):
                assert rank[h, free & kept[h]].max() < rank[h, free & ~kept[h]].min()


def test_distance_is_to_the_output(model, ids, view):
    from decantkv.cache.evicting_cache import cache_argument
    from decantkv.cache.watching import ObservingCache
    from decantkv.lab.theory import oracle

    windows = []
    cache = ObservingCache(model, windows.append, rows=WINDOW)
    with torch.no_grad():
        model(ids, **{cache_argument(model): cache})
    win = windows[2]
    a = oracle.attention(win.q, win.k, win.v, scale=win.scale)[0].view(2, GROUP * WINDOW, -1)
    for h in range(2):
        expected = (a[h][:, None] - win.v[0, h].double()).norm(dim=-1).mean(0)
        assert np.allclose(view.details[2].distance[h], expected.numpy(), rtol=1e-4)


def test_missed_tokens_are_what_the_answer_attends_to(view, model, ids):
    for method in view.methods:
        answer = [int(word) for word in method.answer.replace("w", "").split()]
        p = attentions(model, torch.tensor([ids[0].tolist() + answer]))[:, :, TOKENS:, :TOKENS]
        weight = p.unflatten(1, (-1, GROUP)).mean((2, 3))  # [layers, H, N]
        lost = weight * ~torch.from_numpy(np.stack(method.kept))
        assert np.allclose(method.missed_weight, lost.mean((0, 1)).numpy(), atol=1e-6)
        assert method.missed_share == pytest.approx((lost.sum(-1) / weight.sum(-1)).mean().item(), abs=1e-5)
        first = method.missed[0]
        assert first.weight == pytest.approx(method.missed_weight.max())
        assert first.there == pytest.approx(lost[:, :, first.token].max().item(), abs=1e-6)
        assert lost[first.layer, first.head, first.token].item() == pytest.approx(first.there, abs=1e-6)
        assert [m.weight for m in method.missed] == sorted((m.weight for m in method.missed), reverse=True)


def test_what_protection_cost(view):
    """A span's slots: those it has now and would not have, were the rest of the protection all there is."""
    i = 0
    bought = []
    for place, kept in enumerate(view.methods[i].kept):
        score = torch.from_numpy(view.details[place].scores[i])[None]
        without = select(score, n_keep=27, window=WINDOW, pool="max", kernel_size=11, sinks=2, protect=()).mask(TOKENS)[
            0
        ]
        bought.append((torch.tensor(kept)[:, 20:25] & ~without[:, 20:25]).sum(-1).double().mean().item())
    (cost,) = (span for span in view.methods[i].spans if span.name == "protected")
    assert (cost.start, cost.stop) == (20, 25)
    assert cost.bought == pytest.approx(np.mean(bought))
    assert cost.bought > 0
    assert cost.share == pytest.approx(cost.bought / 27)
    assert 0 < cost.lost < 1
    assert [span.name for span in view.methods[i].spans] == ["window", "sinks", "protected"]


def test_negative_scores_have_no_shares():
    chosen = Settings.parse("knorm", budget=4, protect=[(0, 2)])
    score = np.array([[-9.0, -8, -1, -2, -3, -4]], dtype=np.float32)
    kept = np.array([[True, True, True, True, False, False]])
    (cost,) = span_costs(chosen, [score], [kept])
    assert (cost.bought, cost.share, cost.lost) == (2.0, 0.5, None)


def test_the_terminals_text(view):
    out = Console(file=io.StringIO(), width=120, color_system=None)
    tell(view, out)
    text = out.file.getvalue()
    assert "90 tokens, 27 kept per head" in text
    assert f"|{along(view.methods[0])}|" in text
    assert "protected 20–24" in text
    share = np.stack(view.methods[0].kept).mean((0, 1))
    assert [c == " " for c in along(view.methods[0])] == [part.sum() == 0 for part in np.array_split(share, 64)]


def test_batches_and_nothing_are_refused(model, ids):
    options = {"model_name": "tiny", "max_new_tokens": 1}
    with pytest.raises(ValueError, match="expected one prompt"):
        collect(model, Words(), ids.expand(2, -1), [], [settings()], **options)
    with pytest.raises(ValueError, match="method: expected at least one"):
        collect(model, Words(), ids, [], [], **options)


def test_a_window_of_another_length_is_scored_as_itself(model, ids):
    """Methods with windows of their own are compared side by side; each gets its own rows."""
    from decantkv.cache.evicting_cache import cache_argument
    from decantkv.cache.watching import ObservingCache

    pieces = [""] * TOKENS
    chosen = [settings(), settings("dropkv", window=16)]
    both = collect(model, Words(), ids, pieces, chosen, model_name="tiny", max_new_tokens=1)
    windows = []
    cache = ObservingCache(model, windows.append, rows=16)
    with torch.no_grad():
        model(ids, **{cache_argument(model): cache})
    for i, rows in enumerate((8, 16)):
        win = windows[1]
        own = make_window(win.q[:, :, -rows:], win.k, win.v, scale=win.scale, layer_idx=1)
        assert np.allclose(both.details[1].scores[i], chosen[i].score(own)[0].numpy(), rtol=1e-5)


@pytest.mark.parametrize("allocation", ["ada", "layer", "shared"])
def test_every_allocation_is_shown_as_it_acted(model, ids, allocation):
    """What the cache stored is what the page shows, also where heads keep different numbers."""
    chosen = settings(allocation=allocation)
    shown = collect(model, Words(), ids, [""] * TOKENS, [chosen], model_name="tiny", max_new_tokens=2)
    kept = np.stack(shown.methods[0].kept)
    assert kept.sum() == 27 * kept.shape[0] * kept.shape[1]
    if allocation == "ada":
        assert (kept.sum((1, 2)) == 54).all()
        assert len(set(kept.sum(-1).ravel().tolist())) > 1
    if allocation == "shared":
        assert (kept == kept[:, :1]).all()
