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

import gzip
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decantkv.budget import Budget
from decantkv.cache import cache_argument
from decantkv.methods import Method
from decantkv.observation import ObservingCache
from decantkv.scoring.window import AttentionWindow
from decantkv.theory.measure import Head, Plan, Record, measure
from decantkv.theory.rows import rows_of

_SAME = ("model", "prompt_sha256", "tokens", "method", "budget", "plan", "dtype")  # what a resumed run must share


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
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Measure every layer (or those named) that the results file does not hold yet.

    Args:
        input_ids: [1, N] int64 on the model's device.
        path: the results file; made if missing, continued if it is the same run's.
        method: must look at queries (a window of at least 1).

    Raises:
        ValueError: a batch, a prompt with nothing to evict, a method without a window, or the file of another run.
    """
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise ValueError(f"input_ids: expected one prompt [1, tokens], got {list(input_ids.shape)}")
    if method.window < 1:
        raise ValueError(f"method: expected one that looks at a window of queries, got {method.describe()}")
    least = plan.n_keep + plan.search_size
    if input_ids.shape[1] < least:
        raise ValueError(f"input_ids: expected at least {least} tokens (kept + searched), got {input_ids.shape[1]}")
    header = circumstances(model, input_ids, model_name, method, budget, plan)
    done = _open(path, header)

    with path.open("a", encoding="utf-8") as file:

        def on_window(win: AttentionWindow) -> None:
            if win.layer_idx in done or (layers is not None and win.layer_idx not in layers):
                return
            progress(f"layer {win.layer_idx}")
            with _one_thread():
                _layer(win, method, plan, file)

        cache = ObservingCache(model, on_window, rows=method.window)
        with torch.inference_mode():
            model(input_ids, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Thousands of small matrices: more than one thread per product only waits for the others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _layer(win: AttentionWindow, method: Method, plan: Plan, file: TextIO) -> None:
    scores = method.score(win).cpu()
    win = _on_cpu(win)
    pads = 0 if win.lengths is None else win.kv_len - int(win.lengths[0])
    for kv_head in range(win.num_kv_heads):
        head = Head(rows_of(win, 0, kv_head), scores[0, kv_head], method, win.window, pads, win.layer_idx, kv_head)
        for record in measure(head, plan):
            file.write(json.dumps({key: _round(value) for key, value in record.items()}) + "\n")
    file.write(json.dumps({"kind": "done", "layer": win.layer_idx}) + "\n")
    file.flush()


def _on_cpu(win: AttentionWindow) -> AttentionWindow:
    """The solver runs on the CPU and asks for one small product after another: a GPU would only be waited for."""
    moved = {f.name: getattr(win, f.name) for f in fields(win)}
    return replace(win, **{name: x.cpu() for name, x in moved.items() if isinstance(x, Tensor)})


def circumstances(
    model: PreTrainedModel, input_ids: Tensor, model_name: str, method: Method, budget: Budget, plan: Plan
) -> Record:
    """The results file's first line."""
    ids = input_ids[0].cpu().numpy().astype("<i8").tobytes()
    device = input_ids.device
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
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() + " CPU",
        "command": shlex.join(["decantkv", *sys.argv[1:]]),
        "commit": _commit(),
        "versions": {name: version(name) for name in ("torch", "transformers", "scipy", "numpy")},
        "python": platform.python_version(),
    }


def read(paths: Sequence[Path]) -> tuple[Record, list[Record]]:
    """(the first file's header, all complete layers' records) of one run's results, in one file or several.

    Files may be packed with gzip, ending in .gz.

    Raises:
        ValueError: no header, or files of different runs.
    """
    header: Record | None = None
    records: list[Record] = []
    for path in paths:
        lines = _lines(path)
        if not lines or lines[0].get("kind") != "run":
            raise ValueError(f"{path}: expected a results file that begins with its run, got another")
        header = header or lines[0]
        if any(lines[0][key] != header[key] for key in _SAME):
            raise ValueError(f"{path}: expected the same model, prompt and plan as {paths[0]}, got another run's")
        done = {line["layer"] for line in lines if line["kind"] == "done"}
        records += [line for line in lines[1:] if line["kind"] != "done" and line["layer"] in done]
    if header is None:
        raise ValueError("rows: expected at least one results file, got none")
    return header, records


def _open(path: Path, header: Record) -> set[int]:
    """The layers that a results file already holds; what a stopped run left unfinished is cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.stat().st_size == 0:
        path.write_text(json.dumps(header) + "\n", encoding="utf-8")
        return set()
    lines = _lines(path)
    differ = [key for key in _SAME if lines[0].get(key) != header[key]]
    if differ:
        raise ValueError(
            f"{path}: expected rows of the same run, got another {', '.join(differ)}; choose another --out"
        )
    done = {line["layer"] for line in lines if line["kind"] == "done"}
    whole = [line for line in lines if line["kind"] == "run" or line["layer"] in done]
    path.write_text("".join(json.dumps(line) + "\n" for line in whole), encoding="utf-8")
    return done


def _lines(path: Path) -> list[Record]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    lines = data.decode("utf-8").splitlines()
    parsed = []
    for i, line in enumerate(lines):
        try:
            parsed.append(json.loads(line))
        except json.JSONDecodeError:
            if i != len(lines) - 1:  # only a stopped run's last line may be torn
                raise ValueError(f"{path}: expected JSON Lines, got something else in line {i + 1}") from None
    return parsed


def _round(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _commit() -> str | None:
    """The checkout's commit, with "+" where files differ from it; None outside one; DECANTKV_COMMIT where it is set."""
    if named := os.environ.get("DECANTKV_COMMIT"):
        return named
    try:
        here = Path(__file__).parent
        git = ["git", "-C", str(here)]
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
