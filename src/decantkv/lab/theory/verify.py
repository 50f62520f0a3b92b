"""The theory on a model and a prompt: one results file, written layer by layer and resumed where it stopped.

The file is JSON Lines. Its first line, kind "run", says under which circumstances the rest was measured. Then, for
every layer:
    assumptions  one (layer, query head, row) and one pool: ε, the pool's weight, c* from below (c) and above
    ratio        one searched pool and one k: the shift of the best set, of the k cheapest by raw score, by pooled
                 score, by attention; the bound (null: a condition fails); µ and the relaxed bound for single rows
    eviction     one KV head at the budget: weight and shift of the set that really goes, by each way of choosing
    done         the layer is complete
Shifts are F(S) = √Σ_i ‖Δ_i(S)‖² over the scope's rows, in the values' units. Pools: "lowest" are the pool_size keys
of least attention, "cut" those around the budget's cut by raw score, "evicted" all that the pooled selection drops.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decantkv.cache.evicting_cache import cache_argument
from decantkv.cache.watching import ObservingCache
from decantkv.lab.processes import Workers
from decantkv.lab.provenance import command, commit, device_name, versions
from decantkv.lab.theory.measure import Plan, Record
from decantkv.lab.theory.results import add, only_run, open_rows
from decantkv.lab.theory.workers import ENVIRONMENT, Place, hand_over, records_of, tasks_of
from decantkv.methods import Method
from decantkv.scoring.window import AttentionWindow
from decantkv.selection.budget import Budget


def run(
    model: PreTrainedModel,
    input_ids: Tensor,
    path: Path,
    *,
    model_name: str,
    method: Method,
    budget: Budget,
    plan: Plan,
    layers: Sequence[int] | None = None,
    workers: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Measure every layer (or those named) that no results file of the folder holds yet.

    Args:
        input_ids: [1, N] int64 on the model's device.
        path: the results file; made if missing, continued if it is the same run's.
        method: must look at queries (a window of at least 1).
        workers: how many processes measure KV heads while this one reads the prompt; 1: this one does both. A script
            that asks for more is imported by them, so it must guard its own work by `if __name__ == "__main__"`.

    Raises:
        ValueError: no worker, a batch, a prompt with nothing to evict, a method without a window, or the file of
            another run.
    """
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise ValueError(f"input_ids: expected one prompt [1, tokens], got {list(input_ids.shape)}")
    if workers < 1:
        raise ValueError(f"workers: expected at least 1, got {workers}")
    if method.window < 1:
        raise ValueError(f"method: expected one that looks at a window of queries, got {method.describe()}")
    least = plan.n_keep + plan.search_size
    if input_ids.shape[1] < least:
        raise ValueError(f"input_ids: expected at least {least} tokens (kept + searched), got {input_ids.shape[1]}")
    header = circumstances(model, input_ids, model_name, method, budget, plan)
    with ExitStack() as stack:
        stack.enter_context(only_run(path))
        done = open_rows(path, header)
        layers_file = _Layers(path)
        pool = None
        if workers > 1:
            pool = stack.enter_context(Workers([ENVIRONMENT] * workers, collect=layers_file.add))

        def on_window(win: AttentionWindow) -> None:
            if win.layer_idx in done or (layers is not None and win.layer_idx not in layers):
                return
            progress(f"layer {win.layer_idx}")
            for task in tasks_of(win, method):
                if pool is None:
                    layers_file.add(task.place, records_of(task, method, plan))
                else:
                    hand_over(pool, task, method, plan)

        cache = ObservingCache(model, on_window, rows=method.window)
        with torch.inference_mode():
            model(input_ids, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1)
        progress("the last heads")


class _Layers:
    """Writes a layer once all of its heads are there, so that a stopped run leaves whole layers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: dict[int, dict[int, list[Record]]] = {}

    def add(self, place: Place, records: list[Record]) -> None:
        heads = self._waiting.setdefault(place.layer, {})
        heads[place.kv_head] = records
        if len(heads) < place.kv_heads:
            return
        del self._waiting[place.layer]
        records = [record for kv_head in sorted(heads) for record in heads[kv_head]]
        add(self.path, [*records, {"kind": "done", "layer": place.layer}])


def circumstances(
    model: PreTrainedModel, input_ids: Tensor, model_name: str, method: Method, budget: Budget, plan: Plan
) -> Record:
    """The results file's first line."""
    ids = input_ids[0].cpu().numpy().astype("<i8").tobytes()
    return {
        "kind": "run",
        "model": model_name,
        "geometry": {
            "layers": model.config.num_hidden_layers,
            "query_heads": model.config.num_attention_heads,
            "kv_heads": model.config.num_key_value_heads,
        },
        "prompt_sha256": hashlib.sha256(ids).hexdigest(),  # of the token ids, little-endian int64
        "tokens": input_ids.shape[1],
        "method": method.describe(),
        "budget": str(budget.share if budget.share is not None else budget.tokens),
        "plan": {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(plan).items()},
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device_name(input_ids.device),
        "command": command(),
        "commit": commit(mark=True),
        "versions": versions(("torch", "transformers", "scipy", "numpy")),
        "python": platform.python_version(),
    }
