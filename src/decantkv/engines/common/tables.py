"""Block tables that begin after the freed blocks."""

from __future__ import annotations

import torch
from torch import Tensor


class ShiftedTables:
    """Block tables and lengths without the freed head blocks, in buffers with fixed addresses.

    CUDA graphs read from the addresses of their capture, so every step writes into these buffers, shifted or not.
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
