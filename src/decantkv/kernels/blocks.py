"""Block sizes as a pure function of shape and device class.

Not autotuned: a prompt's length is new nearly every time, and tuning on it would time kernels in the middle of a
prefill. The numbers behind the choices are in docs/kernels.md.
"""

from __future__ import annotations

from dataclasses import dataclass

LARGE_SHARED = 200_000  # bytes of a multiprocessor's shared memory that only data centres' GPUs have, from Hopper on


@dataclass(frozen=True)
class Device:
    """What the choice of blocks depends on.

    Attributes:
        backend: "cuda", "hip" or "cpu" (Triton's interpreter).
        processors: multiprocessors (compute units).
        shared_bytes: shared memory one program may use.
        warpgroups: matrix instructions of whole warpgroups read shared memory (Hopper), so that operands need no
            registers.
    """

    backend: str
    processors: int
    shared_bytes: int
    warpgroups: bool = False


@dataclass(frozen=True)
class Blocks:
    """How a kernel is cut and compiled.

    Attributes:
        rows, keys: per tile.
        warps, stages: of a program and its pipeline.
        rows_first: kernel A's dots have rows, not keys, as their rows.
        apart: kernel B's row tiles are programs of their own, whose scores are joined afterwards.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    rows_first: bool = False
    apart: bool = False


def power_of_two(n: int) -> int:
    """The smallest power of two ≥ n."""
    return 1 << max(n - 1, 0).bit_length()


def padded_dim(dim: int) -> int:
    """head_dim as a block; the excess is masked and costs no memory traffic."""
    return max(16, power_of_two(dim))


def row_tile(dim: int, v_dim: int, itemsize: int, device: Device) -> int:
    """The most rows a program holds at once without spilling registers; more are taken in turn."""
    if itemsize == 4:  # the exact float32 dot is three tf32 products
        return 16
    return 64 if max(padded_dim(dim), padded_dim(v_dim)) <= 128 and device.warpgroups else 32


def padded_rows(rows: int, tile: int) -> int:
    """Rows as the kernels hold them: at least a matrix instruction's 16, and whole tiles."""
    return max(16, power_of_two(rows)) if rows <= tile else -(-rows // tile) * tile


def _fit(rows: int, keys: int, row_bytes: int, key_bytes: int, warps: int, stages: int, device: Device) -> Blocks:
    """Fewer stages, then fewer keys, until a program fits the device's shared memory."""
    if device.backend == "hip":  # a wavefront is two warps wide
        stages, warps = min(stages, 2), 4
    while rows * row_bytes + stages * keys * key_bytes > device.shared_bytes and keys > 16:
        if stages > 2:
            stages -= 1
        else:
            keys //= 2
    return Blocks(rows, keys, warps, stages)


def attend_blocks(
    rows: int, dim: int, v_dim: int, itemsize: int, device: Device, *, bf16: bool = True, keys_first: bool = False
) -> Blocks:
    """Blocks of kernel A, for `rows` = g·w rows a KV head; `keys_first` where its blocks serve another kernel too."""
    tile = row_tile(dim, v_dim, itemsize, device)
    block = min(padded_rows(rows, tile), tile)
    bd, bdv = padded_dim(dim), padded_dim(v_dim)
    wide, hopper = max(bd, bdv) > 128, bf16 and itemsize == 2 and device.warpgroups
    keys, warps, stages = 32, 8, 3
    if itemsize == 4:
        keys = 16
    elif hopper and not keys_first:
        if padded_rows(rows, tile) % 128 == 0 and not wide:
            return Blocks(128, 64, 8, 3, rows_first=True)
        if block > 32:
            return Blocks(block, 64, 4, 2, rows_first=True)
        if not wide or block <= 16:
            keys, warps = 64, 4
    elif hopper and block <= 32 and not wide:
        keys, warps = 64, 4
    elif itemsize == 2 and block == 32 and not (wide or keys_first or device.warpgroups):
        keys = 64 if device.shared_bytes > LARGE_SHARED else keys  # at 32, Triton 3.9 spills for sm100
    return _fit(block, keys, (bd + 2 * bdv) * itemsize, (bd + bdv) * itemsize, warps, stages, device)


def score_blocks(
    rows: int,
    dim: int,
    v_dim: int,
    itemsize: int,
    device: Device,
    *,
    bf16: bool = True,
    one_pass: bool = False,
    more: bool = False,
    projected: bool = False,
) -> Blocks:
    """Blocks of kernel B.

    Args:
        more: its last step holds more registers than the default one.
        projected: it measures behind W_O.
    """
    tile = row_tile(dim, v_dim, itemsize, device)
    block = min(padded_rows(rows, tile), tile)
    bd, bdv = padded_dim(dim), padded_dim(v_dim)
    wide, hopper = max(bd, bdv) > 128, bf16 and itemsize == 2 and device.warpgroups
    if hopper and not more and not one_pass:
        if wide and block <= 16 and not projected:
            return Blocks(block, 64, 4, 3, apart=True)
        if not wide and (block > 32 or projected):
            return Blocks(block, 64, 8 if projected and block > 32 else 4, 2, apart=True)
    narrow = more or projected or itemsize == 4 or wide or rows > tile
    narrow = narrow or (one_pass and (block > 32 or not bf16 or not device.warpgroups))
    row_bytes = (bd + 2 * bdv) * itemsize * (2 if rows > tile else 1)
    warps = 4 if block <= 32 and not narrow else 8
    keys = 32 if narrow else 64
    if (more or projected) and (itemsize == 4 or wide):
        keys = 16
    if rows > tile and not device.warpgroups:
        keys = 16
    return _fit(block, keys, row_bytes, (bd + bdv) * itemsize, warps, 3, device)


def merge_warps(splits: int) -> int:
    """Warps of a program that joins a row's splits: few, so that all rows run at once."""
    return max(1, min(4, power_of_two(splits) // 16))


def norm_blocks(itemsize: int) -> Blocks:
    """Blocks of the norms behind W_O; no rows take part."""
    return Blocks(0, 32, 8, 1) if itemsize == 4 else Blocks(0, 64, 4, 3)


def split_keys(n_keys: int, groups: int, block: int, device: Device, *, per_processor: int = 2) -> tuple[int, int]:
    """(keys a split, splits): one wave of programs over the device, each a whole number of blocks.

    Args:
        groups: B·H times the row tiles, each of which is split.
    """
    slots = max(1, device.processors * per_processor)
    splits = max(1, slots // groups)
    if splits * groups < 0.8 * slots:  # a part-filled wave: cut finer and let the tail level out
        splits = max(1, 2 * slots // groups)
    splits = min(splits, -(-n_keys // block))
    keys = -(-n_keys // (splits * block)) * block
    return keys, -(-n_keys // keys)
