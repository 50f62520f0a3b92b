"""Running lm-eval's tasks from our command line: the harness finds no third-party model class by itself."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Table

from decantkv.base.writing import write_whole
from decantkv.cli.console import Console
from decantkv.hf import loading


def run_tasks(
    model: str,
    tasks: list[str],
    *,
    method: str,
    budget: str,
    allocation: str | None,
    limit: int | None,
    include_path: Path | None,
    lengths: list[int],
    chat: bool,
    out: Path | None,
) -> dict[str, Any]:
    """Run lm-eval tasks and print their scores; returns lm-eval's results.

    Raises:
        ModuleNotFoundError: lm-eval is not installed.
        ValueError: a task that lm-eval does not know, or one that compares likelihoods.
    """
    if find_spec("lm_eval") is None:
        raise ModuleNotFoundError("the command lm needs the package lm-eval: pip install 'decantkv[lm-eval]'")
    import lm_eval
    from lm_eval.tasks import TaskManager

    from decantkv.lab.eval.engine.policy import parse_budget
    from decantkv.lab.eval.lm_eval import DecantLM

    manager = TaskManager(
        include_path=None if include_path is None else str(include_path),
        metadata={"tokenizer": model, "pretrained": model, "max_seq_lengths": lengths},
    )
    if unknown := sorted(set(tasks) - set(manager.all_tasks)):
        raise ValueError(f"tasks: expected tasks that lm-eval knows, got {', '.join(unknown)}")
    loaded, tokenizer = loading.load(model)
    kept = parse_budget(budget)
    lm = DecantLM(
        pretrained=loaded,
        tokenizer=tokenizer,
        method=method,
        budget=kept,
        allocation=allocation,
    )
    results: dict[str, Any] = lm_eval.simple_evaluate(
        model=lm, tasks=tasks, limit=limit, task_manager=manager, apply_chat_template=chat, bootstrap_iters=1000
    )
    shown = {"regime": "aware", "method": method, "budget": budget, "results": results["results"]}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, (json.dumps(shown, indent=1, default=str) + "\n").encode())
    _print(shown)
    return results


def _print(shown: dict[str, Any]) -> None:
    table = Table(
        title=f"lm-eval, {shown['method']} keeping {shown['budget']}, regime: {shown['regime']}", title_justify="left"
    )
    for column in ("task", "metric", "value", "standard error"):
        table.add_column(column)
    for task, values in shown["results"].items():
        for name, value in values.items():
            if isinstance(value, float) and "stderr" not in name and value >= 0:
                error = values.get(name.replace(",", "_stderr,"), "")
                table.add_row(task, name, f"{value:.4f}", f"{error:.4f}" if isinstance(error, float) else "")
    Console(highlight=False, markup=False).print(table)
