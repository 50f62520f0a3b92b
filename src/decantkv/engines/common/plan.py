"""The layout of a prompt's blocks after eviction. Scheduler and workers compute it alike."""

from __future__ import annotations

from decantkv.engines.blocks import BlockSettings, Plan

__all__ = ["Plan", "Plans", "plan"]


def plan(prompt_len: int, settings: BlockSettings) -> Plan:
    """Return the layout of a prompt: its last m whole blocks keep chosen tokens, the blocks before them are freed.

    Each KV head gathers its m·block_size tokens and writes them into the blocks [t − m, t); block t stays as it is.
    From then on the request reads its blocks from t − m on, and its length is shorter by the freed blocks' tokens.

    Args:
        prompt_len: P tokens.
        settings: with the block size of the pool.

    Raises:
        ValueError: protected spans outside the prompt.
    """
    return settings.plan(prompt_len)


class Plans(dict[int, Plan]):
    """A cache of `plan` by prompt length, under one setting: every step needs every row's plan."""

    def __init__(self, settings: BlockSettings) -> None:
        super().__init__()
        self.settings = settings

    def __missing__(self, prompt_len: int) -> Plan:
        made = self[prompt_len] = plan(prompt_len, self.settings)
        return made
