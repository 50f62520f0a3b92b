"""What a cap on the stored prompt costs: a planted number asked for, in one piece and in chunks under caps."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from decantkv.cache.evicting_cache import EvictingCache, cache_argument, deferred
from decantkv.hf.loading import chat_prompt
from decantkv.lab.bench.rows import Row

DIGITS = 4
PREFIX = "The access code for the archive room is"


def planted(tokenizer: Any, text: str, length: int, depth: float, seed: int) -> tuple[Tensor, Tensor]:
    """Token ids [1, n] of a prompt of about `length` tokens with a number at a depth from 0 to 1, and of the number."""
    rng = random.Random(seed)
    code = str(rng.randint(10 ** (DIGITS - 1), 10**DIGITS - 1))
    words = tokenizer(text, add_special_tokens=False)["input_ids"][: max(1, length - 80)]
    place = round(len(words) * depth)
    before, after = (tokenizer.decode(part) for part in (words[:place], words[place:]))
    asked = f"{before}\n{PREFIX} {code}.\n{after}\n\nWhat is the access code for the archive room?"
    prompt, templated = chat_prompt(tokenizer, asked)
    ids = tokenizer(prompt + f"{PREFIX} ", return_tensors="pt", add_special_tokens=not templated)["input_ids"]
    return ids, tokenizer(code, return_tensors="pt", add_special_tokens=False)["input_ids"]


@torch.no_grad()
def answer_loss(model: PreTrainedModel, cache: Any, ids: Tensor, answer: Tensor, chunk: int) -> tuple[float, bool]:
    """(nats a token of the answer, whether each of them is the likeliest) after a prompt read in chunks."""
    name = cache_argument(model)
    with deferred(cache):
        for part in ids.split(chunk, 1):
            out = model(part, **{name: cache}, logits_to_keep=1)
    logits = [out.logits[0, -1:]]
    if answer.shape[1] > 1:
        logits.append(model(answer[:, :-1], **{name: cache}).logits[0])
    said = torch.cat(logits).float()
    return float(F.cross_entropy(said, answer[0])), bool((said.argmax(-1) == answer[0]).all())


def measure(
    model: PreTrainedModel,
    tokenizer: Any,
    text: str,
    *,
    length: int,
    prompts: int,
    budget: float,
    chunk: int,
    caps: Sequence[int],
) -> Iterator[Row]:
    """A row per way of reading: all kept, one piece at the budget, then each cap."""
    asked = [planted(tokenizer, text, length, i / max(1, prompts - 1), seed=i) for i in range(prompts)]
    ways: list[tuple[str, float, int, dict[str, int]]] = [("all kept", 1.0, length * 2, {})]
    ways.append(("one piece", budget, length * 2, {}))
    ways += [(f"cap {cap}", budget, chunk, {"prefill_chunk": chunk, "max_kv_tokens": cap}) for cap in caps]
    for name, share, step, bounds in ways:
        losses, right = [], 0
        for ids, answer in asked:
            cache = EvictingCache(model, budget=share, **bounds)  # type: ignore[arg-type]  # bounds are named integers
            ids, answer = ids.to(model.device), answer.to(model.device)
            loss, found = answer_loss(model, cache, ids, answer, step)
            losses.append(loss)
            right += found
        yield {
            "step": "cap-cost", "way": name, "budget": share, **bounds, "prompts": prompts,
            "kv_len": [ids.shape[1] for ids, _ in asked], "nats_a_token": round(statistics.mean(losses), 4),
            "nats": [round(x, 4) for x in losses], "right": right,
        }  # fmt: skip
