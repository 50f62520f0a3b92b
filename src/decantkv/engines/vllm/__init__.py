"""DropKV inside stock vLLM: a plug-in that vLLM loads by itself and that does nothing until an option switches it on.

Switch it on with `--additional-config '{"decantkv": {"budget": 0.1}}'` or, in every process's environment,
`DECANTKV_CONFIG='{"budget": 0.1}'`.
"""

from __future__ import annotations


def register() -> None:
    """Entry point of `vllm.general_plugins`; vLLM calls it once in each of its processes."""
    from decantkv.engines.vllm.activation import install

    install()
