"""Additions to vLLM's attention backends: shifted tables in the metadata, eviction after a prompt's last attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decantkv.base.transfer import to_device
from decantkv.engines.blocks import BlockSettings
from decantkv.engines.common.plan import Plans
from decantkv.engines.common.steps import Queries, Step, read_step
from decantkv.engines.common.tables import ShiftedTables
from decantkv.engines.common.windows import Windows
from decantkv.engines.vllm.batch import current, told
from decantkv.engines.vllm.counters import CLOCK
from decantkv.engines.vllm.spec import DropKVSpec

ATTRIBUTE = "decantkv_step"  # of the metadata that a builder returns


class EvictingBuilder:
    """Mixed into a backend's metadata builder, before it."""

    eviction: BlockSettings | None
    persistent = False  # whether a replayed graph reads the tables
    supports_update_block_table = False  # a table alone would come unshifted

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        self.eviction = kv_cache_spec.eviction if isinstance(kv_cache_spec, DropKVSpec) else None
        self._tables: ShiftedTables | None = None
        self._first: tuple[Any, Tensor] | None = None
        if self.eviction is None:
            return
        self._plans = Plans(self.eviction)
        if kv_cache_spec.block_size != self.eviction.block_size:
            raise ValueError(
                f"block_size: expected kernels that read the pool's blocks of {self.eviction.block_size} tokens, "
                f"got {kv_cache_spec.block_size}"
            )
        self._block_size = self.eviction.block_size
        largest = getattr(vllm_config.compilation_config, "max_cudagraph_capture_size", None)
        self._rows = max(vllm_config.scheduler_config.max_num_seqs, largest or 0)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Return the backend's own metadata over shifted tables, with the step attached."""
        if self.eviction is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        step = self._step(common_attn_metadata)
        shifted = self._shift(common_attn_metadata, step)
        metadata = super().build(0, shifted, fast_build)  # type: ignore[misc]
        setattr(metadata, ATTRIBUTE, step)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Return metadata of a dummy batch."""
        with told(None):
            return super().build_for_cudagraph_capture(common_attn_metadata)  # type: ignore[misc]

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """Never: requests that share a prefix no longer share what they keep of it."""
        return False

    def _step(self, common: Any) -> Step | None:
        batch = current()
        if batch is None or self.eviction is None:
            return None
        starts, seq_lens = common.query_start_loc_cpu.numpy(), common.seq_lens_cpu_upper_bound.numpy()
        return read_step(batch, self._plans, starts, seq_lens)

    def _shift(self, common: Any, step: Step | None) -> Any:
        table, seq_lens = common.block_table_tensor, common.seq_lens
        if not self.persistent and (step is None or not step.shifts):
            return common
        rows, columns = seq_lens.shape[0], table.shape[1]
        if self._tables is None or self._tables.table.shape[1] < columns or self._tables.table.shape[0] < rows:
            if self.persistent and self._tables is not None:
                raise RuntimeError(f"tables: expected at most {list(self._tables.table.shape)}, got {[rows, columns]}")
            self._tables = ShiftedTables(max(rows, self._rows), columns, self._block_size, table.device)
        first_blocks = np.zeros(rows, dtype=np.int32) if step is None else step.first_blocks
        table, seq_lens = self._tables.write(table[:rows], seq_lens, self._to_device(first_blocks, table.device))
        changed: dict[str, Any] = {"block_table_tensor": table, "seq_lens": seq_lens}
        upper = common.seq_lens_cpu_upper_bound
        if step is not None and upper is not None:
            upper = upper - torch.from_numpy(first_blocks) * self._tables.block_size
            changed |= {"seq_lens_cpu_upper_bound": upper, "max_seq_len": int(upper.max())}
        return replace(common, **changed)

    def _to_device(self, numbers: Any, device: torch.device) -> Tensor:
        """Return row counts on the device; they are reused if they are those of the step before."""
        if self._first is None or not np.array_equal(numbers, self._first[0]):
            self._first = numbers, to_device([int(n) for n in numbers], device)
        return self._first[1]


class EvictingImpl:
    """Mixed into a backend's implementation, before it: it attends as ever, then the prompts that ended are evicted."""

    _windows: Windows | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Attend as vLLM does, then evict; shapes are vLLM's."""
        out: Tensor = super().forward(  # type: ignore[misc]
            layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
        )
        step: Step | None = getattr(attn_metadata, ATTRIBUTE, None)
        if step is None or not step.queries:
            return out
        with CLOCK.running(kv_cache.device), torch.no_grad():
            if self._windows is None:
                self._windows = Windows(step.settings.rows)
            finished = self._windows.take(step, query)
            if finished:
                self.evict(layer, finished, kv_cache, attn_metadata.block_table, step.settings)
        return out

    def evict(
        self,
        layer: Any,
        finished: list[tuple[Queries, Tensor]],
        kv_cache: Tensor,
        block_table: Tensor,
        settings: BlockSettings,
    ) -> None:
        """Keep each prompt's chosen tokens in its last whole blocks.

        Args:
            finished: prompts whose attention is done, with the queries [w, HQ, D] of their windows.
            kv_cache: the layer's, in the backend's layout.
            block_table: [rows, blocks] int32.
        """
        raise NotImplementedError
