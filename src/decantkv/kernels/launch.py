"""Launching the scoring kernels: scratch, grids, and what each quantity and dtype needs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decantkv.kernels.attend import attend_kernel, merge_kernel
from decantkv.kernels.blocks import merge_warps, padded_dim, padded_rows, power_of_two, row_tile
from decantkv.kernels.launcher import Launch, address, aligned, current_stream, on_device
from decantkv.kernels.plan import Plan, device_of, plan, precision_of
from decantkv.kernels.primitives import logit_factors
from decantkv.kernels.pull import chunk_sum_kernel, pull_kernel
from decantkv.kernels.score import (
    ALIGNMENT,
    AVG_POOL,
    MASS,
    MAX_POOL,
    NO_POOL,
    OUTPUT_PERTURBATION,
    PERTURBATION,
    PULL,
    add_dominant_kernel,
    dominant_cost_kernel,
    join_tiles_kernel,
    score_kernel,
)
from decantkv.kernels.weigh import NormCut, norm_cut, norm_kernel, output_metric

QUANTITIES = {"perturbation": PERTURBATION, "attention_mass": MASS, "alignment": ALIGNMENT, "chunk_alignment": PULL}
ROW_POOLS = {"none": NO_POOL, "max": MAX_POOL, "avg": AVG_POOL}
MERGE_CHUNK = 64  # splits a step of the merge reads at once
CHUNK_BLOCK = 1024  # keys a program sums chunks of
JOIN_BLOCK = 1024  # scores a program joins row tiles of


class Pages(NamedTuple):
    """Where the keys of paged storage lie.

    Attributes:
        table: [R, nblocks] int32, the last dimension contiguous.
        lengths: [R] integers on the device.
        n_keys: the most keys that a row has, the width of the scores.
    """

    table: Tensor
    lengths: Tensor
    n_keys: int


class Task(NamedTuple):
    """What is computed: a quantity's name and options, as `decantkv.kernels.window_scores` documents them."""

    quantity: str = "perturbation"
    reduce: str = "sum"
    row_pool: str = "none"
    kernel_size: int = 1
    chunk: int = 4
    projected: bool = False

    @property
    def kind(self) -> int:
        """Which of kernel B's quantities it is."""
        return OUTPUT_PERTURBATION if self.projected else QUANTITIES[self.quantity]

    @property
    def pool(self) -> int:
        """Which of kernel B's poolings of a row's weights it takes."""
        return NO_POOL if self.kernel_size == 1 else ROW_POOLS[self.row_pool]

    def holds_more(self, dim: int, itemsize: int) -> bool:
        """Return whether kernel B's last step needs more registers than for DropKV's own score."""
        if self.pool != NO_POOL:
            return True
        return self.kind in (ALIGNMENT, PULL) and (itemsize == 4 or padded_dim(dim) > 128)


@dataclass(frozen=True)
class Prepared:
    """All of a call that only depends on shapes, strides, dtypes and options; a prompt's layers share it."""

    plan: Plan
    task: Task
    one_pass: bool
    groups: int
    rows: int
    part_words: int
    row_width: int
    row_words: int
    scalars: tuple[int, int, int, float, float]
    strides: tuple[int, ...]
    attend: Launch
    merge: Launch
    pull: Launch
    score: Launch
    dominant_cost: Launch
    add_dominant: Launch
    join_tiles: Launch
    chunk_sum: Launch
    norm: Launch
    norm_cut: NormCut

    @property
    def last(self) -> Launch:
        """What a call launches last: once it is compiled, so are the others."""
        if self.task.kind == PULL:
            return self.chunk_sum
        if self.tiles > 1:
            return self.join_tiles
        return self.add_dominant if self.rescues else self.score

    @property
    def tiles(self) -> int:
        """Row tiles that kernel B takes in programs of their own."""
        return self.rows // self.plan.score.rows if self.plan.score.apart else 1

    @property
    def rescues(self) -> bool:
        """Whether the model's own output is used, so that dominant keys are paid for afterwards."""
        return self.one_pass and self.task.kind == PERTURBATION


_prepared: dict[Hashable, Prepared] = {}
_PREPARED_LIMIT = 4096


def launch_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    start: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    quantity: str = "perturbation",
    reduce: str = "sum",
    row_pool: str = "none",
    kernel_size: int = 1,
    chunk: int = 4,
    output_projection: Tensor | None = None,
    pages: Pages | None = None,
    plan_: Plan | None = None,
) -> Tensor:
    """Run the kernels; arguments as in `decantkv.kernels.window_scores`, already checked.

    With `pages`, k and v are [blocks, H, block_size, D] views of the storage.
    """
    task = Task(quantity, reduce, row_pool, kernel_size, chunk, output_projection is not None)
    if q.stride(3) != 1:
        q = q.contiguous()
    if lse is None or task.kind not in (PERTURBATION, MASS) or (out is None and task.kind == PERTURBATION):
        out = lse = None
    elif out is not None:
        out = out if out.dtype == v.dtype and out.stride(3) == 1 else out.to(v.dtype).contiguous()
    lse = lse.contiguous() if lse is not None else None
    weighing = (None, None) if output_projection is None else output_metric(output_projection, k.shape[1])
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), k.dtype, k.device,
        None if out is None else out.stride(), None if lse is None else lse.dtype,
        None if start is None else start.dtype, None if sink_logits is None else sink_logits.dtype,
        softcap, scale, task, plan_, aligned(q, k, v, out, lse, start, sink_logits),
        None if pages is None else (pages.n_keys, pages.lengths.dtype, aligned(pages.table, pages.lengths)),
    )  # fmt: skip
    known = _prepared.get(key)
    if known is None:
        if len(_prepared) >= _PREPARED_LIMIT:
            _prepared.clear()
        padded, sink = start is not None, sink_logits is not None
        n_keys = None if pages is None else pages.n_keys
        known = _prepared[key] = prepare(q, k, v, scale, softcap, task, padded, sink, lse is not None, n_keys, plan_)
    with on_device(k.device):
        return _run(known, q, k, v, start, pages, sink_logits, out, lse, *weighing)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None,
    task: Task,
    padded: bool,
    sink: bool,
    hints: bool,
    paged_keys: int | None = None,
    plan_: Plan | None = None,
) -> Prepared:
    """Bind every launch of a call to its constants; `paged_keys` is the width of the scores of paged storage."""
    batch, heads, v_dim, window = q.shape[0], k.shape[1], v.shape[3], q.shape[2]
    page, n_keys = (0, k.shape[2]) if paged_keys is None else (k.shape[2], paged_keys)
    dim = k.shape[3]
    group, groups = q.shape[1] // heads, batch * heads
    device, kind = device_of(k.device), task.kind
    tile = row_tile(dim, v_dim, k.element_size(), device)
    rows, bd, bdv = padded_rows(group * window, tile), padded_dim(dim), padded_dim(v_dim)
    if plan_ is not None:
        rows = -(-rows // max(plan_.attend.rows, plan_.score.rows)) * max(plan_.attend.rows, plan_.score.rows)
    values = kind not in (MASS, PULL)  # whether kernel A makes an output
    # beyond one row tile the rescue of dominant keys has no registers left: the kernels then make their own output
    one_pass = hints and (kind == MASS or rows <= tile)
    more = task.holds_more(max(dim, v_dim), k.element_size())
    chosen = plan_ or plan(
        group * window, dim, v_dim, k.dtype, n_keys, groups, device, one_pass=one_pass and kind != MASS, more=more,
        projected=task.projected, keys_first=kind == PULL,
    )  # fmt: skip
    splits = chosen.splits
    factor, cap2 = logit_factors(scale, softcap)
    row_width = 0 if kind == MASS else bdv
    if one_pass:
        part_width, words = (bdv + 2 if kind == PERTURBATION else 0), 2
        row_words = groups * rows * words if kind == PERTURBATION else 16
    else:
        part_width = max(bdv + 4 if values else 4, bdv if kind == PULL else 0)
        row_words = groups * rows * (row_width + (4 if kind == OUTPUT_PERTURBATION else 3))
    shape = {"G": group, "W": window, "D": dim, "DV": v_dim, "ROWS": rows}
    tiles = {"BD": bd, "BDV": bdv}
    width = {"RW": row_width}
    modes = {"PADDED": padded, "CAPPED": softcap is not None}
    pooling = {"POOL": task.pool, "KERNEL": task.kernel_size}
    paging = {"PAGE": page}
    precision = precision_of(k.dtype, device)
    numbers = {"PARTS": 2 if k.dtype == torch.bfloat16 else 1, "PRECISION": precision, **paging}
    a_blocks = {**shape, "BM": chosen.attend.rows, "BN": chosen.attend.keys, **tiles}
    b_blocks = {**shape, "BM": chosen.score.rows, "BN": chosen.score.keys, **tiles}
    merging = {
        "G": group, "W": window, "DV": v_dim, "ROWS": rows, "BDV": bdv,
        "BS": power_of_two(splits), "CHUNK": min(MERGE_CHUNK, power_of_two(splits)), "SINK": sink,
    }  # fmt: skip
    norms = norm_cut(k.element_size(), v_dim, n_keys, batch * q.shape[1], device)
    a_options = {"warps": chosen.attend.warps, "stages": chosen.attend.stages}
    return Prepared(
        plan=chosen,
        task=task,
        one_pass=one_pass,
        groups=groups,
        rows=rows,
        part_words=groups * splits * rows * part_width,
        row_width=row_width,
        row_words=row_words,
        scalars=(n_keys, chosen.keys_per_split, splits, factor, cap2),
        strides=(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        attend=Launch(
            attend_kernel,
            {**a_blocks, **modes, "VALUES": values, **numbers, "ROWS_FIRST": chosen.attend.rows_first},
            **a_options,
        ),
        merge=Launch(
            merge_kernel,
            {**merging, "VALUES": values, **width, "METRIC": kind == OUTPUT_PERTURBATION, **paging},
            warps=merge_warps(splits),
        ),
        pull=Launch(
            pull_kernel, {**a_blocks, **width, **modes, **pooling, "FIRST": task.chunk, **numbers}, **a_options
        ),
        score=Launch(
            score_kernel,
            {
                **b_blocks, **width, **modes,
                "QUANTITY": kind, "MAX": task.reduce == "max", **pooling, "ONE_PASS": one_pass,
                "A_PARTS": 1 if one_pass or k.dtype == torch.float32 else 2, **numbers,
                "APART": chosen.score.apart and rows > chosen.score.rows,
            },
            warps=chosen.score.warps, stages=chosen.score.stages,
        ),
        dominant_cost=Launch(dominant_cost_kernel, merging, warps=8),
        add_dominant=Launch(
            add_dominant_kernel,
            {"G": group, "ROWS": rows, "BM": power_of_two(rows), "MAX": task.reduce == "max"},
            warps=1,
        ),
        join_tiles=Launch(
            join_tiles_kernel,
            {"TILES": rows // chosen.score.rows, "G": group, "MAX": task.reduce == "max", "BN": JOIN_BLOCK},
            warps=4,
        ),
        chunk_sum=Launch(
            chunk_sum_kernel,
            {"W": window, "CHUNK": task.chunk, "PADDED": padded, "BN": CHUNK_BLOCK, **paging},
            warps=4,
        ),
        norm=Launch(
            norm_kernel,
            {
                "G": group, "DV": v_dim, "BN": norms.blocks.keys, **norms.constants, "PRECISION": precision, **paging,
            },
            warps=norms.blocks.warps, stages=norms.blocks.stages,
        ),
        norm_cut=norms,
    )  # fmt: skip


def _run(
    p: Prepared,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    pages: Pages | None,
    sink_logits: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
    metric: Tensor | None,
    unit: Tensor | None,
) -> Tensor:
    batch, heads, n_keys, splits, kind = q.shape[0], k.shape[1], p.scalars[0], p.plan.splits, p.task.kind
    strides_v = p.strides[6:]
    table, lengths, s_table = (None, None, 0) if pages is None else (pages.table, pages.lengths, pages.table.stride(0))
    stream = current_stream(k.device)
    scores = torch.empty((batch, heads, n_keys), dtype=torch.float32, device=k.device)
    tokens = scores
    if kind == PULL or p.tiles > 1:
        tokens = torch.empty((p.tiles, *scores.shape), dtype=torch.float32, device=k.device)
    scratch = torch.empty(p.part_words + p.row_words, dtype=torch.float32, device=k.device)
    strides_out = v.stride()[:3] if out is None else out.stride()[:3]
    norms = k.new_empty((batch, q.shape[1], n_keys), dtype=torch.float32) if metric is not None else None
    tensors = (q, k, v, start, sink_logits, out, lse, metric, unit, norms, table, lengths, tokens)
    at: tuple[Any, ...]
    if p.last.ready:
        base = scratch.data_ptr()
        at = (*map(address, tensors), base, base + 4 * p.part_words)
    else:
        at = (*tensors, scratch, scratch[p.part_words :])
    (
        p_q,
        p_k,
        p_v,
        p_start,
        p_sink,
        p_out,
        p_lse,
        p_metric,
        p_unit,
        p_norm,
        p_table,
        p_lengths,
        p_tokens,
        p_part,
        p_rows,
    ) = at
    a_programs = (splits * (p.rows // p.plan.attend.rows), p.groups, 1)
    if not p.one_pass:
        p_out, p_lse = p_v, p_rows
        p.attend(
            a_programs, stream, p_q, p_k, p_v, p_part, p_start, p_table, p_lengths,
            *p.scalars, *p.strides, s_table, heads,
        )  # fmt: skip
        p.merge(
            (p.rows, p.groups, 1), stream, p_v, p_part, p_sink, p_metric, p_rows, p_table,
            splits, *strides_v, s_table, heads,
        )  # fmt: skip
    if kind == PULL:
        p.pull(
            a_programs, stream, p_q, p_k, p_v, p_rows, p_part, p_start, p_table, p_lengths,
            *p.scalars, *p.strides, s_table, heads,
        )  # fmt: skip
        width = p.rows * p.row_width
        parts = scratch[: p.groups * splits * width].view(p.groups, splits, width)
        torch.sum(parts, 1, out=scratch[p.part_words :].view(p.groups, -1)[:, :width])
    if metric is not None:
        p.norm(
            (p.norm_cut.splits, batch * q.shape[1], 1), stream, p_v, p_metric, p_norm, p_table, p_lengths,
            n_keys, p.norm_cut.keys_per_split, *strides_v, s_table, heads,
        )  # fmt: skip
    p.score(
        (splits * p.tiles, p.groups, 1), stream,
        p_q, p_k, p_v, p_v if p_out is None else p_out, p_lse, p_rows, p_tokens, p_part, p_start,
        p_table, p_lengths, p_norm, p_unit, *p.scalars, *p.strides, *strides_out, s_table, heads,
    )  # fmt: skip
    if p.tiles > 1:
        words = scores.numel()
        p.join_tiles(
            (-(-words // JOIN_BLOCK), 1, 1), stream, p_tokens, address(scores) if p.last.ready else scores, words
        )
    if p.rescues:
        p.dominant_cost((p.rows, p.groups, 1), stream, p_v, p_part, p_lse, p_sink, p_rows, splits, *strides_v, heads)
        p.add_dominant((p.groups, 1, 1), stream, p_tokens, p_rows, n_keys)
    if kind == PULL:
        ends = (tokens, scores, start, lengths)
        p.chunk_sum(
            (-(-n_keys // CHUNK_BLOCK), p.groups, 1), stream,
            *(map(address, ends) if p.last.ready else ends), n_keys, heads,
        )  # fmt: skip
    return scores
