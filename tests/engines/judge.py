"""Whether an engine evicted rightly, judged so that rounding passes and a mistake does not.

Texts of two implementations part where two tokens are almost as likely, and kept sets where two tokens score almost
alike; both happen in bfloat16, and after either a comparison says nothing. So an engine's evictions are noted
(`recording`) and judged one by one: the queries, keys and values that it scored are transformers', what it kept is
what these scores allow, and the cache holds it to the bit. Then transformers keeps *the engine's own* tokens and reads
the engine's own answer, so that every log-probability of it can be compared.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from decantkv.cache.watching import ObservingCache
from decantkv.engines.blocks import BlockSettings, Plan
from decantkv.scoring.window import AttentionWindow, make_window

# how far (relative, of a layer's norm) what an engine scores may lie from transformers' float32: bfloat16 on a CPU
# differs by 0.016, a window that is one token off by 1.4
INPUTS = {"float32": 0.02, "bfloat16": 0.08}
SLACK = 0.05  # a dropped token may outscore a kept one by this share, in exact scores of the very numbers in the cache


class Mistake(AssertionError):
    """What an engine did and should not have."""


@dataclass(frozen=True)
class Reading:
    """A prompt as transformers reads it.

    Attributes:
        windows: of every layer, with all keys and values.
        first: [V] log-probabilities of the first token of the answer.
    """

    windows: list[AttentionWindow]
    first: Tensor


def rounded(model: Any, dtype: str) -> Any:
    """A float32 copy whose weights hold what an engine of `dtype` holds.

    Only the weights are rounded: `model.to(bfloat16)` would round the frequencies of RoPE too, which engines keep.
    """
    made = copy.deepcopy(model)
    for weight in made.parameters():
        weight.data = weight.data.to(getattr(torch, dtype)).float()
    return made


@torch.no_grad()
def read(model: Any, ids: list[int], rows: int) -> Reading:
    """Read a prompt with a full cache."""
    windows: list[AttentionWindow] = []
    cache = ObservingCache(model, windows.append, rows=rows)
    out = model(torch.tensor([ids], device=model.device), past_key_values=cache, use_cache=True)
    return Reading(windows, out.logits[0, -1].float().log_softmax(-1))


@torch.no_grad()
def logprobs(model: Any, reading: Reading, kept: list[Tensor] | None, answer: list[int]) -> Tensor:
    """[T] log-probabilities of an answer's tokens, each after those before it.

    Args:
        kept: per layer [H, K] tokens of the prompt that are kept; None: all.
    """
    cache = DynamicCache()
    for i, win in enumerate(reading.windows):
        k, v = win.k, win.v
        if kept is not None:
            slots = kept[i].to(k.device)[None, ..., None].expand(-1, -1, -1, k.shape[3])
            k, v = k.gather(2, slots), v.gather(2, slots)
        cache.update(k.contiguous(), v.contiguous(), i)
    said, prompt_len = [reading.first], reading.windows[0].kv_len
    for i, token in enumerate(answer[:-1]):
        ids, place = (torch.tensor([[number]], device=model.device) for number in (token, prompt_len + i))
        out = model(ids, past_key_values=cache, position_ids=place, use_cache=True)
        said.append(out.logits[0, -1].float().log_softmax(-1))
    return torch.stack(said).gather(1, torch.tensor(answer, device=model.device)[:, None])[:, 0].cpu()


def rounds(noted: list[dict[str, Any]], request: int) -> list[list[dict[str, Any]]]:
    """A request's evictions, each a note per layer; more than one where it was preempted."""
    own = [note for note in noted if note["request"] == request]
    starts = [i for i, note in enumerate(own) if i == 0 or note["layer"] == 0]
    return [own[i:j] for i, j in itertools.pairwise([*starts, len(own)])]


def kept_tokens(layers: list[dict[str, Any]], reading: Reading, settings: BlockSettings, dtype: str) -> list[Tensor]:
    """Per layer [H, K] the tokens that one eviction kept, the last ones included.

    Raises:
        Mistake: it scored something else than the prompt's window, keeps what scores too little, or damaged the cache.
    """
    if [note["layer"] for note in layers] != list(range(len(reading.windows))):
        raise Mistake(f"expected every layer once, got {[note['layer'] for note in layers]}")
    made = settings.plan(reading.windows[0].kv_len)
    kept = []
    for note, want in zip(layers, reading.windows, strict=True):
        about = f"{made.prompt_len} tokens, layer {note['layer']}"
        planned = {"prompt_len": made.prompt_len, "first_block": made.first_block, "tail_block": made.tail_block}
        if {name: note[name] for name in planned} != planned:
            raise Mistake(f"{about}: expected the plan {planned}, got another")
        got = make_window(note["q"].transpose(0, 1)[None], note["k"][None], note["v"][None], scale=want.scale)
        for name in "qkv":
            far = distance(getattr(got, name), getattr(want, name).cpu())
            if not far < INPUTS[dtype]:
                raise Mistake(f"{about}: {name} lies {far:.3f} of its norm from transformers'")
        found = stored(note, made, about)
        check_scores(found, replace(got, **{name: getattr(got, name).double() for name in "qkv"}), settings, about)
        tail = torch.arange(made.prompt_len - made.tail, made.prompt_len)
        kept.append(torch.cat([found, tail.expand(len(found), -1)], 1))
    return kept


def stored(note: dict[str, Any], made: Plan, about: str) -> Tensor:
    """[H, m·block_size] which token each slot of the compacted blocks holds, found by its very bits.

    Raises:
        Mistake: a slot holds no token of the prompt, tokens are not ascending, or anything else in the pool changed.
    """
    size = made.block_size
    start, stop = made.first_block * size, made.tail_block * size
    before, after = (torch.cat([note[k], note[v]], -1) for k, v in (("k", "v"), ("k_after", "v_after")))
    if note["changed"] or not torch.equal(before[:, :start], after[:, :start]):
        raise Mistake(f"{about}: {note['changed']} slots outside the compacted blocks changed")
    if not torch.equal(before[:, stop:], after[:, stop:]):
        raise Mistake(f"{about}: the partial block changed")
    same = (after[:, start:stop, None] == before[:, None]).all(-1)  # [H, slots, N]
    if not bool((same.sum(-1) == 1).all()):
        raise Mistake(f"{about}: {int((same.sum(-1) != 1).sum())} slots hold no token of the prompt")
    found = same.int().argmax(-1)
    if not bool((found.diff(dim=1) > 0).all()):
        raise Mistake(f"{about}: kept tokens are not ascending")
    return found


def check_scores(found: Tensor, win: AttentionWindow, settings: BlockSettings, about: str) -> None:
    """That no dropped token scores clearly more than a kept one, by the formulas in float64.

    Raises:
        Mistake: one does, or a protected one was dropped.
    """
    exact = replace(settings, impl="reference")
    priority = exact.order(exact.score(win), win=win).priority[0].expand(len(found), -1)
    made = settings.plan(win.kv_len)
    dropped = torch.ones_like(priority, dtype=torch.bool).scatter(1, found, value=False)
    dropped[:, made.prompt_len - made.tail :] = False
    best = priority.masked_fill(~dropped, -torch.inf).amax(1)
    worst = priority.gather(1, found).amin(1)
    if not bool((worst >= best * (1 - SLACK)).all()):
        raise Mistake(f"{about}: dropped tokens score up to {float((best / worst).max()):.2f} times a kept one's score")


def distance(got: Tensor, want: Tensor) -> float:
    """‖got − want‖/‖want‖; inf for tensors of another shape."""
    if got.shape != want.shape:
        return float("inf")
    return float((got.double() - want.double()).norm() / want.double().norm())


@dataclass(frozen=True)
class Judged:
    """One answer beside transformers'.

    Attributes:
        differences: [T] of log-probabilities, with the same tokens kept.
        controls: the largest difference to transformers with other tokens kept: all, the last ones, one block more or
            less; empty where nothing was evicted. A bound that is not far below these could not tell a mistake.
    """

    differences: Tensor
    controls: dict[str, Tensor]


def judge(
    model: Any,
    settings: BlockSettings | None,
    asked: list[list[int]],
    got: dict[str, Any],
    dtype: str,
) -> list[Judged]:
    """Judge every eviction and compare every answer.

    Args:
        model: in float32, `rounded` as the engine's.
        settings: None: of an engine that does not evict.
        got: of `engine_run.run` with `record`.

    Raises:
        Mistake: an eviction is missing, or see `kept_tokens`.
    """
    judged = []
    for i, ids in enumerate(asked):
        said, answer = torch.tensor(got["logprobs"][i]), got["tokens"][i]
        reading = read(model, ids, 1 if settings is None else settings.rows)
        full = logprobs(model, reading, None, answer)
        if settings is None or not settings.plan(len(ids)).evicts:
            if rounds(got["evictions"], i):
                raise Mistake(f"prompt {i} of {len(ids)} tokens was evicted")
            judged.append(Judged((said - full).abs(), {}))
            continue
        each = [kept_tokens(layers, reading, settings, dtype) for layers in rounds(got["evictions"], i)]
        if not each:
            raise Mistake(f"prompt {i} of {len(ids)} tokens was not evicted")
        wanted = torch.stack([logprobs(model, reading, kept, answer) for kept in each])
        differences = (said - wanted).abs().amin(0)  # a preempted request answers after several
        others = {name: logprobs(model, reading, kept, answer) for name, kept in mistakes(each[-1], reading, settings)}
        controls = {name: (wanted[-1] - other).abs() for name, other in {"all": full, **others}.items()}
        judged.append(Judged(differences, controls))
    return judged


def mistakes(kept: list[Tensor], reading: Reading, settings: BlockSettings) -> list[tuple[str, list[Tensor]]]:
    """Kept tokens as they would be after a mistake in compaction or in the table."""
    made = settings.plan(reading.windows[0].kv_len)
    size, heads = made.block_size, len(kept[0])
    last = torch.arange(made.prompt_len - made.kept, made.prompt_len).expand(heads, -1)
    more = torch.arange((made.first_block - 1) * size, made.first_block * size).expand(heads, -1)
    return [
        ("the last", [last] * len(kept)),
        ("a block more", [torch.cat([more, tokens], 1) for tokens in kept]),
        ("a block less", [tokens[:, size:] for tokens in kept]),
    ]
