"""Masks: read a prompt's padding from the mask of its attention call, and hide filler slots from later tokens."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class PromptMask(NamedTuple):
    """Padding and window of a prompt, read from the model's mask.

    Attributes:
        lengths: real tokens of each batch row, with pads on the left; None if there are no pads.
        window: [B or 1, 1, w, N] bool, True where one of the last w rows sees a key; None if that is plainly causal.
    """

    lengths: tuple[int, ...] | None
    window: Tensor | None


_memo = threading.local()


def read_prompt_mask(
    mask: Any, *, batch: int, kv_len: int, rows: int, device: torch.device, empty: bool = False
) -> PromptMask:
    """Read the mask of a prompt's attention call. Layers share one mask, so the result is remembered.

    Args:
        mask: None, 2-D [B, N] (flash), 4-D bool or additive [B or 1, 1, N, N] (sdpa, eager), or a flex BlockMask.
        empty: allow rows that hold pads alone, as in an early chunk.

    Raises:
        ValueError: an additive mask that is not only 0 and −inf, a mask per head, or pads that are not leftmost.
    """
    if mask is None:
        return PromptMask(None, None)
    key = (batch, kv_len, rows)
    known = getattr(_memo, "last", None)
    if known is not None and known[0]() is mask and known[1] == key:
        answer: PromptMask = known[2]
    else:
        answer = _read(_last_rows(mask, batch=batch, kv_len=kv_len, rows=rows, device=device), batch, kv_len, rows)
        _memo.last = (weakref.ref(mask), key, answer)
    if not empty and answer.lengths is not None and 0 in answer.lengths:
        raise ValueError("attention_mask: expected at least one real token in every row, got a row of pads")
    return answer


def among_new(mask: Any, *, new: int, shown: Callable[[], Tensor | None]) -> Any:
    """Return the mask of `new` tokens among themselves; a 4-D mask of the caller may also show all older ones.

    Args:
        shown: gives [B, S] bool, which of the older slots hold a token, or None if slots are not the given tokens.

    Raises:
        ValueError: a 4-D mask over other keys, or one that hides some of the older tokens.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[-1] == new:
        return mask
    older = shown()
    if older is None or mask.shape[-1] != older.shape[1] + new:
        stored = "evicted" if older is None else f"{older.shape[1]} older"
        raise ValueError(
            f"attention_mask: expected a 2-D mask of all tokens, got a 4-D one over {mask.shape[-1]} keys for {new} "
            f"tokens after {stored} ones"
        )
    seen = _last_rows(mask, batch=older.shape[0], kv_len=mask.shape[-1], rows=new, device=mask.device)[:, 0]
    pads = ~seen[:, :, -new:].diagonal(dim1=1, dim2=2)  # nobody reads what they see
    if not bool(((seen[:, :, :-new] == older[:, None]) | pads[..., None]).all()):
        raise ValueError(
            "attention_mask: expected causal attention to all older tokens where layers attend for themselves, got a "
            "mask that hides some or shows pads; use decode='model', or read the prompt in one piece"
        )
    return mask[..., -new:]


def real_tokens(mask: Any, *, batch: int, kv_len: int, device: torch.device) -> tuple[int, ...]:
    """Return the number of real tokens in each batch row of a prompt's mask; 0 for a row of pads alone.

    Raises:
        ValueError: pads that are not leftmost.
    """
    if mask is None:
        return (kv_len,) * batch
    real = _last_rows(mask, batch=batch, kv_len=kv_len, rows=1, device=device)[:, 0, 0].expand(batch, -1)
    lengths = real.sum(-1)
    _expect_leftmost_pads(real, lengths)
    return tuple(int(n) for n in lengths.tolist())


def _expect_leftmost_pads(real: Tensor, lengths: Tensor) -> Tensor:
    """Check that padding is on the left and return the mask [B, N] unchanged."""
    kv_len = real.shape[1]
    left_padded = torch.arange(kv_len, device=real.device) >= (kv_len - lengths)[:, None]
    if not bool((real == left_padded).all()):
        raise ValueError(
            "attention_mask: expected padding on the left (tokenizer.padding_side='left'), got it elsewhere"
        )
    return left_padded


def _last_rows(mask: Any, *, batch: int, kv_len: int, rows: int, device: torch.device) -> Tensor:
    """Return [B or 1, 1, w, N] bool: the keys that the last `rows` query rows see; 2-D masks are made causal."""
    key = torch.arange(kv_len, device=device)
    row = torch.arange(kv_len - rows, kv_len, device=device)
    if not isinstance(mask, Tensor):  # flex attention's BlockMask carries the rule itself
        b = torch.arange(batch, device=device)[:, None, None]
        seen: Tensor = mask.mask_mod(b, torch.zeros_like(b), row[None, :, None], key[None, None, :])
        return seen.expand(batch, rows, kv_len)[:, None].bool()
    if mask.dim() == 2:
        real: Tensor = mask[:, None, None, -kv_len:].bool()
        return real & (key <= row[:, None])
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise ValueError(f"attention_mask: expected [batch, 1, queries, keys], got {list(mask.shape)}")
    last = mask[:, :, -rows:, :kv_len]
    if last.dtype == torch.bool:
        return last
    hidden = last <= torch.finfo(last.dtype).min / 2
    if not bool((hidden | (last == 0)).all()):
        raise ValueError("attention_mask: expected only 0 and −inf, got additive biases, which eviction cannot keep")
    return ~hidden


def _read(seen: Tensor, batch: int, kv_len: int, rows: int) -> PromptMask:
    key = torch.arange(kv_len, device=seen.device)
    real = seen[:, 0, -1]
    lengths = real.sum(-1)
    left_padded = _expect_leftmost_pads(real, lengths)
    causal = key <= torch.arange(kv_len - rows, kv_len, device=seen.device)[:, None]
    plain = bool((seen == (causal & left_padded[:, None, None])).all())
    numbers = tuple(int(n) for n in lengths.tolist())
    numbers = numbers * batch if len(numbers) == 1 else numbers
    return PromptMask(None if set(numbers) == {kv_len} else numbers, None if plain else seen)


def refit(mask: Any, *, q_len: int, kv_len: int, later: int) -> Any:
    """Return the mask for a layer that stores another number of tokens than the first layer.

    transformers builds one mask, for the first layer. Its last `later` columns are tokens after the prompt, the same in
    every layer. All slots of the prompt are shown; `hide_filler` hides filler.

    Raises:
        ValueError: the mask is a BlockMask, which cannot be stretched to another length.
    """
    if mask is not None and not isinstance(mask, Tensor):
        raise ValueError("allocation: expected one that gives all layers alike with flex attention; use sdpa or eager")
    if mask is None or mask.shape[-1] == kv_len:
        return mask
    mask = mask[..., -min(later, mask.shape[-1]) :]
    seen = 1 if mask.dim() == 2 or mask.dtype == torch.bool else 0.0
    return torch.nn.functional.pad(mask, (kv_len - mask.shape[-1], 0), value=seen)


def hide_filler(
    mask: Any,
    valid: Tensor,
    *,
    query: Tensor,
    kv_len: int,
    backend: str,
    causal: bool = True,
) -> Tensor:
    """Return the backend's mask for new tokens, with the kept cache's filler slots hidden.

    Args:
        mask: what transformers built for the stored length: None, 2-D, or 4-D bool or additive.
        valid: [B, 1 or H, K] bool, which of the first K slots hold a token.
        query: [B, HQ, q, D] the new tokens' queries.
        kv_len: K plus the new tokens.
        causal: whether new tokens see only earlier ones if there is no mask.

    Raises:
        ValueError: the backend's kind of mask cannot hide these slots.
    """
    batch, num_heads, q_len = query.shape[:3]
    new = valid.new_ones(*valid.shape[:2], kv_len - valid.shape[2])
    shown = torch.cat([valid, new], dim=2)
    if "flash" in backend:
        if valid.shape[1] != 1:
            raise ValueError(f"{backend}: expected one set of kept tokens for all heads, got a set per head")
        return shown[:, 0] if mask is None else shown[:, 0] & mask[:, -kv_len:].bool()
    if mask is not None and not isinstance(mask, Tensor):
        raise ValueError(f"{backend}: expected a batch whose rows keep equally many tokens; use sdpa or eager instead")
    shown = shown.repeat_interleave(num_heads // shown.shape[1], dim=1) if shown.shape[1] != 1 else shown
    shown = shown[:, :, None].expand(batch, -1, q_len, kv_len)
    if mask is None and causal and q_len > 1:
        shown = shown & torch.ones(q_len, kv_len, dtype=torch.bool, device=valid.device).tril(kv_len - q_len)
    if backend == "eager" or (mask is not None and mask.dtype != torch.bool):
        mask = query.new_zeros(1, 1, q_len, kv_len) if mask is None else mask[..., :kv_len]
        hidden: Tensor = mask.masked_fill(~shown, torch.finfo(mask.dtype).min)
        return hidden
    return shown if mask is None else shown & mask[..., :kv_len]


def padded_turn() -> ValueError:
    """Return the error for pads after the prompt while answers are evicted."""
    return ValueError(
        "attention_mask: expected turns of equal length in all rows with every=, which evicts rows together, got pads "
        "after the prompt; give such rows one at a time, or leave every out"
    )
