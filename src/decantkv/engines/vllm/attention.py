"""What our backends add to vLLM's: shifted tables when metadata is built, eviction after a prompt's last attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decantkv.engines.blocks import BlockSettings
from decantkv.engines.vllm.batch import current, told
from decantkv.engines.vllm.spec import DropKVSpec
from decantkv.engines.vllm.steps import Step, read_step

ATTRIBUTE = "decantkv_step"  # of the metadata that a builder returns


class ShiftedTables:
    """Block tables and lengths without the freed head blocks, in buffers that keep their place in memory.

    CUDA graphs read from the addresses they saw at capture, so every build writes here, shifted or not.
    """

    def __init__(self, rows: int, columns: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.table = torch.zeros(rows, columns, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._columns = torch.arange(columns, device=device)

    def write(self, table: Tensor, seq_lens: Tensor, first_blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Skip each row's first blocks.

        Args:
            table: [R, blocks] int32. seq_lens: [R] int32.
            first_blocks: [R] int32, blocks that are skipped.

        Returns:
            The table [R, blocks] and the lengths [R], views of the buffers. What lies past a row's blocks is arbitrary.
        """
        rows, columns = table.shape
        out, lengths = self.table[:rows, :columns], self.seq_lens[:rows]
        places = (self._columns[:columns] + first_blocks[:, None].long()).clamp_(max=columns - 1)
        out.copy_(table.gather(1, places))
        torch.sub(seq_lens, first_blocks.to(seq_lens.dtype) * self.block_size, out=lengths)
        return out, lengths


class EvictingBuilder:
    """Mixed into a backend's metadata builder, before it."""

    eviction: BlockSettings | None
    supports_update_block_table = False  # a table alone would come unshifted

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        self.eviction = kv_cache_spec.eviction if isinstance(kv_cache_spec, DropKVSpec) else None
        self._tables: ShiftedTables | None = None
        if self.eviction is None:
            return
        if kv_cache_spec.block_size != self.eviction.block_size:
            raise ValueError(
                f"block_size: expected kernels that read the pool's blocks of {self.eviction.block_size} tokens, "
                f"got {kv_cache_spec.block_size}"
            )
        self._rows = vllm_config.scheduler_config.max_num_seqs

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """The backend's own metadata over shifted tables, with the step beside it."""
        if self.eviction is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        step = self._step(common_attn_metadata)
        shifted = self._shift(common_attn_metadata, step)
        metadata = super().build(0, shifted, fast_build)  # type: ignore[misc]
        setattr(metadata, ATTRIBUTE, step)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Metadata of a dummy batch."""
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
        return read_step(batch, self.eviction, starts, seq_lens)

    def _shift(self, common: Any, step: Step | None) -> Any:
        table, seq_lens = common.block_table_tensor, common.seq_lens
        if not self._persistent and (step is None or not step.shifts):
            return common
        rows, columns = seq_lens.shape[0], table.shape[1]
        if self._tables is None or self._tables.table.shape[1] < columns or self._tables.table.shape[0] < rows:
            assert self.eviction is not None
            self._tables = ShiftedTables(max(rows, self._rows), columns, self.eviction.block_size, table.device)
        first_blocks = np.zeros(rows, dtype=np.int32) if step is None else step.first_blocks
        table, seq_lens = self._tables.write(table[:rows], seq_lens, self._to_device(first_blocks, table.device))
        changed: dict[str, Any] = {"block_table_tensor": table, "seq_lens": seq_lens}
        upper = common.seq_lens_cpu_upper_bound
        if step is not None and upper is not None:
            upper = upper - torch.from_numpy(first_blocks) * self._tables.block_size
            changed |= {"seq_lens_cpu_upper_bound": upper, "max_seq_len": int(upper.max())}
        return replace(common, **changed)

    _persistent = False

    def _to_device(self, numbers: Any, device: torch.device) -> Tensor:
        return torch.from_numpy(numbers).to(device)
