"""An attention call as the methods receive it: its last queries with all keys and values."""

from __future__ import annotations

from torch import Tensor

from decantkv.base.options import Need
from decantkv.base.precision import alike
from decantkv.base.transfer import to_device
from decantkv.hf.attention_hook import AttentionCall
from decantkv.hf.masks import PromptMask
from decantkv.hf.model_parts import output_projection
from decantkv.scoring.window import AttentionWindow, Rotate, make_window


def window_of(
    call: AttentionCall,
    seen: PromptMask,
    rows: int,
    layer_idx: int,
    *,
    needs: frozenset[Need] = frozenset(),
    rotate: Rotate | None = None,
    hints: tuple[Tensor, Tensor] | None = None,
) -> AttentionWindow:
    """The attention call of a prompt as the methods receive it, with the last `rows` queries and what they need.

    `hints`: those rows' output [B, HQ, w, Dv] and log-sum-exp [B, HQ, w], where the attention gave them.
    """
    lengths = None if seen.lengths is None else to_device(seen.lengths, call.key.device)
    query, key, value = alike(call.query[:, :, -rows:], call.key, call.value)
    return make_window(
        query,
        key,
        value,
        scale=call.scale,
        lengths=lengths,
        softcap=call.softcap,
        sink_logits=call.sink_logits,
        mask=seen.window,
        out=None if hints is None else hints[0],
        lse=None if hints is None else hints[1],
        layer_idx=layer_idx,
        queries=call.query if "queries" in needs and call.query.shape[2] == call.key.shape[2] else None,
        output_projection=output_projection(call.module, call.query, call.value) if "W_O" in needs else None,
        rotate=rotate,
    )
