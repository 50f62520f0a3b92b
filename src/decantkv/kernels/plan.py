"""What a launch is cut by: the device behind the tensors, blocks and splits."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from decantkv.kernels.blocks import (
    Blocks,
    Device,
    attend_blocks,
    padded_dim,
    padded_rows,
    score_blocks,
    split_keys,
)
from decantkv.kernels.primitives import INTERPRETED

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_DIM = 256  # of a head
# keys of a split up to which kernel A's shorter code counts for more than its slower dots
SHORT_SPLIT = 256


class Plan(NamedTuple):
    """Blocks of kernels A and B, and the keys a split takes; tests and the benchmark replace it."""

    attend: Blocks
    score: Blocks
    keys_per_split: int
    splits: int


@functools.cache
def device_of(device: torch.device) -> Device:
    """The device class behind a torch device; the interpreter stands for a small one."""
    if INTERPRETED or device.type != "cuda":
        return Device("cpu", 2, 1 << 20)
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 65536)
    if torch.version.hip:
        return Device("hip", properties.multi_processor_count, shared)
    return Device("cuda", properties.multi_processor_count, shared, warpgroups=properties.major == 9)


@functools.lru_cache(maxsize=1024)
def plan(
    rows: int, dim: int, v_dim: int, dtype: torch.dtype, n_keys: int, groups: int, device: Device, *,
    one_pass: bool = False, more: bool = False, projected: bool = False, keys_first: bool = False,
) -> Plan:  # fmt: skip
    """Blocks and splits for `rows` = g·w rows, `groups` = B·H; the rest as in `attend_blocks` and `score_blocks`."""
    bf16 = dtype == torch.bfloat16
    a = attend_blocks(rows, dim, v_dim, dtype.itemsize, device, bf16=bf16, keys_first=keys_first)
    b = score_blocks(
        rows, dim, v_dim, dtype.itemsize, device, bf16=bf16, one_pass=one_pass, more=more, projected=projected
    )
    tiles = padded_rows(rows, a.rows) // a.rows
    # 64 keys of wide heads fill a multiprocessor, and so do 128 rows
    wide = max(padded_dim(dim), padded_dim(v_dim)) > 128
    alone = bf16 and device.warpgroups and (a.rows == 128 or (wide and a.keys == 64))
    keys, splits = split_keys(n_keys, groups * tiles, max(a.keys, b.keys), device, per_processor=1 if alone else 2)
    if bf16 and device.warpgroups and a.rows == 32 and not wide and not keys_first and keys <= SHORT_SPLIT:
        a = Blocks(32, 64, 4, 2, rows_first=True)
    return Plan(a, b, keys, splits)


def precision_of(dtype: torch.dtype, device: Device) -> str:
    """Return how a dot treats float32 operands: full precision from three tf32 products where the device has them."""
    if device.backend != "cuda":
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"  # float16 widened beside weights: tf32 holds it exactly


def whole_heads_misfit(names: str, heads: Tensor, others: Tensor) -> str | None:
    """Why a kernel that multiplies whole heads [B, H, N, D] with others cannot take them, or None."""
    if heads.dtype != others.dtype or heads.dtype not in DTYPES:
        return f"{names} are {heads.dtype} and {others.dtype}, not both one of bfloat16, float16, float32"
    # the three products of float32's split operands would not fit
    most = MAX_DIM // 2 if heads.dtype == torch.float32 else MAX_DIM
    return f"head_dim {heads.shape[3]} is above {most}" if heads.shape[3] > most else None
