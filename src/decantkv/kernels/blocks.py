"""Block sizes as a pure function of shape and device class.

Not autotuned: a prompt's length is new nearly every time, and tuning on it would time kernels in the middle of a
prefill. The numbers behind the choices are in docs/kernels.md.
"""

from __future__ import annotations

from dataclasses import dataclass

ROW_TILE = 64  # more rows in one tile spill registers


@dataclass(frozen=True)
class Device:
    """What the choice of blocks depends on.

    Attributes:
        backend: "cuda", "hip" or "cpu" (Triton's interpreter).
        processors: multiprocessors (compute units).
        shared_bytes: shared memory one program may use.
    """

    backend: str
    processors: int
    shared_bytes: int


@dataclass(frozen=True)
class Blocks:
    """How a kernel is cut and compiled: rows and keys per tile, warps, pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


def power_of_two(n: int) -> int:
    """The smallest power of two ≥ n."""
    return 1 << max(n - 1, 0).bit_length()


def padded_rows(rows: int) -> int:
    """Rows as the kernels hold them: at least a matrix instruction's 16, tiles of 64 beyond one tile."""
    return max(16, power_of_two(rows)) if rows <= ROW_TILE else -(-rows // ROW_TILE) * ROW_TILE


def padded_dim(dim: int) -> int:
    """head_dim as a block; the excess is masked and costs no memory traffic."""
    return max(16, power_of_two(dim))


def _fit(rows: int, keys: int, row_bytes: int, key_bytes: int, warps: int, stages: int, device: Device) -> Blocks:
    """Fewer stages, then fewer keys, until a program fits the device's shared memory."""
    if device.backend == "hip":
        stages = min(stages, 2)
    while rows * row_bytes + stages * keys * key_bytes > device.shared_bytes:
        if stages > 2 or (stages == 2 and keys == 16):
            stages -= 1
        elif keys > 16:
            keys //= 2
        else:
            break
    return Blocks(rows, keys, warps, stages)


def attend_blocks(rows: int, dim: int, v_dim: int, itemsize: int, device: Device) -> Blocks:
    """Blocks of kernel A, for `rows` = g·w rows a KV head."""
    tile = min(padded_rows(rows), ROW_TILE)
    width = padded_dim(dim) + padded_dim(v_dim)
    return _fit(tile, 64, 2 * width * itemsize, width * itemsize, 4, 3, device)


def score_blocks(rows: int, dim: int, v_dim: int, itemsize: int, device: Device) -> Blocks:
    """Blocks of kernel B."""
    tile = min(padded_rows(rows), ROW_TILE)
    width = padded_dim(dim) + padded_dim(v_dim)
    return _fit(tile, 64, (width + padded_dim(v_dim)) * itemsize, width * itemsize, 4, 3, device)


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
