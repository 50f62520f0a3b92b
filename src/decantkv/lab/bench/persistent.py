"""An experiment, kept for its number: kernel A, merge and B as one cooperative launch with barriers over the grid."""

# ruff: noqa: ANN001, ANN201 - a kernel's arguments are pointers, strides and constants
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from decantkv.kernels import blocks, launch
from decantkv.kernels.attend import attend_split, merge_row
from decantkv.kernels.score import score_split
from decantkv.scoring.window import AttentionWindow


@triton.jit
def wait_for_all(p_barrier, n_programs):
    """Every program has written what it wrote before."""
    tl.debug_barrier()
    tl.atomic_add(p_barrier, 1, sem="acq_rel")
    while tl.atomic_add(p_barrier, 0, sem="acquire") < n_programs:
        pass
    tl.debug_barrier()


@triton.jit(do_not_specialize=["n_keys", "keys_per_split", "n_splits", "H", "n_groups"])
def persistent_kernel(
    p_q, p_k, p_v, p_part, p_rows, p_score, p_barrier,
    n_keys, keys_per_split, n_splits, scale, cap2,
    sqb, sqh, sqw, skb, skh, skn, svb, svh, svn, H, n_groups,
    G: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (splits · B·H), all resident at once; bf16, no pads, no cap, rows in one tile."""
    pid = tl.program_id(0)
    n_programs = n_splits * n_groups
    i_split = pid % n_splits
    i_bh = pid // n_splits
    attend_split(
        i_split, 0, i_bh, p_q, p_k, p_v, p_part, p_q, p_q, p_q, n_keys, keys_per_split, n_splits, scale, cap2,
        sqb, sqh, sqw, skb, skh, skn, svb, svh, svn, 0, H, G, W, D, DV, ROWS, ROWS, BN, BD, BDV,
        False, False, True, 2, "tf32", 0,
    )  # fmt: skip
    wait_for_all(p_barrier, n_programs)
    for task in range(pid, ROWS * n_groups, n_programs):
        merge_row(
            task % ROWS, task // ROWS, p_v, p_part, p_part, p_part, p_rows, p_part, n_splits, svb, svh, svn, 0,
            H, G, W, DV, ROWS, BDV, BS, CHUNK, False, True, BDV, False, 0,
        )  # fmt: skip
    wait_for_all(p_barrier + 1, n_programs)
    score_split(
        i_split, i_bh, p_q, p_k, p_v, p_v, p_rows, p_rows, p_score, p_part, p_q, p_q, p_q, p_q, p_q,
        n_keys, keys_per_split, n_splits, scale, cap2,
        sqb, sqh, sqw, skb, skh, skn, svb, svh, svn, svb, svh, svn, 0, H, G, W, D, DV, ROWS, ROWS, BN, BD, BDV,
        BDV, False, False, 0, False, 0, 1, False, 2, 2, "tf32", 0,
    )  # fmt: skip


def persistent_scores(win: AttentionWindow) -> Tensor:
    """DropKV's cost [B, H, N] in one launch."""
    q, k, v = win.q, win.k, win.v
    p = launch.prepare(q, k, v, win.scale, None, launch.Task(), padded=False, sink=False, hints=False)
    scores = torch.empty(k.shape[:3], dtype=torch.float32, device=k.device)
    part = torch.empty(p.part_words, dtype=torch.float32, device=k.device)
    rows = torch.empty(p.row_words, dtype=torch.float32, device=k.device)
    barrier = torch.zeros(2, dtype=torch.int32, device=k.device)
    splits = p.plan.splits
    persistent_kernel[(splits * p.groups, 1, 1)](
        q, k, v, part, rows, scores, barrier, *p.scalars, *p.strides, k.shape[1], p.groups,
        G=win.group_size, W=win.window, D=k.shape[3], DV=v.shape[3], ROWS=p.rows, BN=p.plan.score.keys,
        BD=blocks.padded_dim(k.shape[3]), BDV=blocks.padded_dim(v.shape[3]), BS=blocks.power_of_two(splits),
        CHUNK=min(launch.MERGE_CHUNK, blocks.power_of_two(splits)),
        num_warps=p.plan.score.warps, num_stages=p.plan.score.stages, launch_cooperative_grid=True,
    )  # fmt: skip
    return scores


def measured(win: AttentionWindow) -> dict[str, float]:
    """GPU time (µs, p50) of the split launches and of the one launch, after checking that they agree."""
    from decantkv.lab.bench.timing import gpu_time
    from decantkv.scoring import compute

    win = dataclasses.replace(win, out=None, lse=None)
    split = compute("perturbation", win, impl="triton")
    if not torch.equal(split, persistent_scores(win)):
        raise RuntimeError("the one launch and the split disagree")
    return {
        "split_us": gpu_time(lambda: compute("perturbation", win, impl="triton")).p50,
        "persistent_us": gpu_time(lambda: persistent_scores(win)).p50,
    }
