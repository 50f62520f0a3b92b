"""What is timed side by side: every way this library or a rival scores the same window."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from decantkv import scoring
from decantkv.scoring import reference
from decantkv.scoring.window import AttentionWindow

Call = Callable[[], Tensor]


def expanded(win: AttentionWindow) -> Tensor:
    """DropKV's cost as plain torch would write it: all weights at once, ‖a−v‖² multiplied out. No care for sinks."""
    q = win.q.unflatten(1, (win.num_kv_heads, win.group_size)).flatten(2, 3)
    s = (q @ win.k.mT).float() * win.scale
    row = torch.arange(q.shape[2], device=q.device) % win.window + win.kv_len - win.window
    s = s.masked_fill(torch.arange(win.kv_len, device=q.device) > row[:, None], -torch.inf)
    p = s.softmax(-1)
    a = (p.to(win.v.dtype) @ win.v).float()
    v = win.v.float()
    distance = a.square().sum(-1, keepdim=True) + v.square().sum(-1)[:, :, None] - 2 * (a @ v.mT)
    odds = p / (1 - p + 1e-6)
    scores: Tensor = (odds.square() * distance.clamp_min(0)).sum(2) / win.group_size
    return scores


def kvpress_snapkv(win: AttentionWindow) -> Call | str:
    """kvpress's SnapKV score on the same keys, or why it cannot run here.

    Only its scoring file is imported. It projects and rotates the window's queries itself (a few rows) and reads the
    keys alone: a cheaper score than DropKV's.
    """
    if "kvpress" not in sys.modules:
        spec = importlib.util.find_spec("kvpress")
        if spec is None or not spec.submodule_search_locations:
            return "kvpress is not installed"
        home = spec.submodule_search_locations[0]
        for name, path in (("kvpress", home), ("kvpress.presses", f"{home}/presses")):
            package = types.ModuleType(name)
            package.__path__ = [path]  # its own __init__ would import every press and its dependencies
            sys.modules[name] = package
    try:
        press: Any = importlib.import_module("kvpress.presses.snapkv_press").SnapKVPress
    except (ImportError, AttributeError) as error:
        version = importlib.import_module("transformers").__version__
        return f"kvpress does not import beside transformers {version}: {error}"
    heads, width, dim = win.q.shape[1], win.q.shape[1] * win.q.shape[3], win.q.shape[3]
    module = types.SimpleNamespace(
        config=types.SimpleNamespace(num_attention_heads=heads, num_key_value_heads=win.num_kv_heads),
        head_dim=dim,
        q_proj=torch.nn.Linear(width, width, bias=False, device=win.k.device, dtype=win.k.dtype),
    )
    hidden = torch.randn(win.batch, win.window + 1, width, device=win.k.device, dtype=win.k.dtype)
    angle = torch.zeros(win.batch, win.window, dim, device=win.k.device, dtype=win.k.dtype)
    scorer = press(compression_ratio=0.95, window_size=win.window, kernel_size=5)
    positions = {"position_embeddings": (angle.cos(), angle.sin())}

    def call() -> Tensor:
        with torch.no_grad():
            result: Tensor = scorer.score(module, hidden, win.k, win.v, None, positions)
        return result

    return call


def contenders(win: AttentionWindow, hinted: AttentionWindow) -> dict[str, tuple[Call | str, bool]]:
    """Name → (call or why not, whether a CUDA graph can hold it).

    Args:
        hinted: the same window with the model's output and log-sum-exp.
    """
    return {
        "triton": (lambda: scoring.compute("perturbation", win, impl="triton"), True),
        "triton one-pass": (lambda: scoring.compute("perturbation", hinted, impl="triton"), True),
        "triton attention mass": (lambda: scoring.compute("attention_mass", win, impl="triton"), True),
        "torch tiled": (lambda: scoring.compute("perturbation", win, impl="torch"), False),
        "torch expanded": (lambda: expanded(win), False),
        "torch dense reference": (lambda: reference.perturbation(win), False),
        "kvpress SnapKV": (kvpress_snapkv(win), False),
    }


def dense_bytes(win: AttentionWindow) -> int:
    """About what the dense reference holds at once."""
    return 4 * math.prod(win.q.shape[:3]) * win.kv_len * 14
