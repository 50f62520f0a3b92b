"""Imports point one way, and importing the package loads and patches nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import decantkv

SOURCE = Path(decantkv.__file__).parent

# a module may import from its own layer or from one before it
LAYERS = [
    {
        "options",
        "writing",
        "json_lines",
        "precision",
        "transfer",
        "buffers",
        "chunks",
        "lse",
        "versions",
        "processes",
        "circumstances",
        "terminal",
        "context",
    },
    {"budget", "ranking"},
    {"peers"},
    {"scoring", "kernels", "allocation"},
    {"methods"},
    {"selection", "api", "needs"},
    {"settings", "records", "masks", "ragged", "inner"},
    {"interface", "generating", "bounded", "fused", "identity", "forged"},
    {"door", "layers", "evicting"},
    {"ragged_layers"},
    {"files", "joining", "graphs", "weighing", "reading", "forwards"},
    {"cache"},
    {"observation", "integration", "planning"},
    {"models"},
    {"engines"},
    {"theory", "eval", "bench"},
    {"report", "show", "doctor"},
    {"cli", "__main__"},
]


def imported(path):
    """The decantkv modules a file imports, deferred imports included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "decantkv":
            parts = node.module.split(".")
            yield from ([".".join(parts[1:])] if len(parts) > 1 else [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            yield from (a.name.partition(".")[2] for a in node.names if a.name.startswith("decantkv."))


def files():
    return [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]


def layer(module):
    top = module.split(".")[0]
    return next((i for i, names in enumerate(LAYERS) if top in names), None)


def test_arrows_point_one_way():
    wrong = []
    for path in files():
        here = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        if path.name == "cli.py":
            continue  # a command's own file hangs on the command line
        for there in imported(path):
            assert layer(here) is not None, f"{here} is in no layer"
            if layer(there) is None or layer(there) > layer(here):
                wrong.append(f"{here} imports {there}")
    assert not wrong


def test_implementations_do_not_know_each_other():
    implementations = {"scoring.reference", "scoring.tiled", "scoring.triton"}
    for name in implementations:
        path = SOURCE / f"{name.replace('.', '/')}.py"
        assert not implementations & set(imported(path)), name
    oracle = SOURCE / "theory" / "oracle.py"
    assert not list(imported(oracle)), "the oracle shares no code"


def test_only_the_integration_knows_transformers():
    allowed = {
        "door",
        "layers",
        "cache",
        "interface",
        "forwards",
        "generating",
        "reading",
        "integration",
        "observation",
        "models",
        "theory",
        "eval",
        "bench",
    }
    allowed |= {
        "planning",
        "inner",
        "graphs",
        "files",
        "joining",
        "evicting",
        "ragged_layers",
        "show",
        "cli",
        "weighing",
        "identity",
    }
    for path in files():
        names = {n.module or "" for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)}
        if any(name.split(".")[0] == "transformers" for name in names):
            assert path.relative_to(SOURCE).with_suffix("").parts[0] in allowed, path


def test_score_loads_neither_transformers_nor_triton():
    code = (
        "import sys, torch, decantkv\n"
        "x = torch.rand(1, 2, 20, 8)\n"
        "decantkv.select(decantkv.score(x[:, :, -4:], x, x), n_keep=6, window=4)\n"
        "print([m for m in ('transformers', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_patches_nothing():
    code = (
        "import torch\n"
        "from transformers import modeling_utils\n"
        "from transformers.models.llama import modeling_llama as llama\n"
        "functions = modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping\n"
        "def now(): return dict(functions), llama.eager_attention_forward\n"
        "before = now()\n"
        "import decantkv.cache.evicting_cache, decantkv.attachment, decantkv.cache.watching\n"
        "print(before == now())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_every_name_is_public():
    for name in decantkv.__all__:
        assert getattr(decantkv, name) is not None


def test_every_name_is_listed_and_typed():
    assert {*decantkv.__all__, "__version__"} <= {*dir(decantkv)}
    assert (SOURCE / "py.typed").is_file()


def test_the_command_can_be_interrupted_while_libraries_load():
    code = (
        "import sys, decantkv.cli as cli\n"
        "assert 'torch' not in sys.modules\n"
        "def interrupted(): raise KeyboardInterrupt\n"
        "cli.build = interrupted\n"
        "cli.main(['methods'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")
