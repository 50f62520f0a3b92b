"""Window queries of one layer, which may come in several chunks."""

from __future__ import annotations

from torch import Tensor

from decantkv.engines.common.steps import Queries, Step


class Windows:
    """Store window queries until the prompt's last chunk; a prompt that is read in one piece stores nothing.

    It holds w·HQ·D numbers per prompt between chunks.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._held: dict[str, Tensor] = {}

    def take(self, step: Step, query: Tensor) -> list[tuple[Queries, Tensor]]:
        """Return the prompts that end in this step, with their whole windows.

        Args:
            query: [tokens, HQ, D] of the step.

        Returns:
            One [w, HQ, D] tensor per prompt of `step.finishing`.
        """
        for name in [name for name in self._held if name not in step.alive]:
            del self._held[name]  # aborted between chunks
        whole = []
        for run in step.queries:
            part = query[run.start : run.stop]
            if run.place == 0 and run.last:
                whole.append((run, part))
                continue
            window = self._held.get(run.request_id)
            if window is None:
                window = self._held[run.request_id] = query.new_zeros(self.rows, *query.shape[1:])
            window[run.place : run.place + len(part)] = part
            if run.last:
                whole.append((run, self._held.pop(run.request_id)))
        return whole
