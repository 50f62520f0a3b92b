"""Imports point one way, room by room, and importing the package loads and patches nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import decantkv

SOURCE = Path(decantkv.__file__).parent

# a room imports from itself and from the rooms before it; `lab` imports the library, never the other way
ROOMS = ["base", "kernels", "selection", "scoring", "methods", "hf", "cache", "decode", "engines", "cli", "lab"]
# the root's own modules, each with the last room that it may import from
ROOT = {"__init__": "decode", "__main__": "cli", "api": "methods", "attachment": "decode", "settings": "methods"}
# paths that documents once showed: each warns, and goes with the next release
MOVED = {"eval", "models", "records"}
KNOW_TRANSFORMERS = {"attachment", "cache", "cli", "decode", "hf", "lab"}


def imported(path):
    """The decantkv modules a file imports when it runs, deferred imports included; those for types alone left out."""
    tree = ast.parse(path.read_text())
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "decantkv":
            parts = node.module.split(".")
            yield from ([".".join(parts[1:])] if len(parts) > 1 else [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            yield from (a.name.partition(".")[2] for a in node.names if a.name.startswith("decantkv."))


def top(module):
    return module.split(".")[0]


def files():
    found = [(path, ".".join(path.relative_to(SOURCE).with_suffix("").parts)) for path in SOURCE.rglob("*.py")]
    return [(path, here) for path, here in found if top(here) not in MOVED]


def test_nothing_else_lies_in_the_root():
    inside = {path.stem for path in SOURCE.iterdir() if path.name not in ("__pycache__", "py.typed")}
    assert inside == {*ROOMS, *ROOT, *MOVED}


def test_imports_go_to_earlier_rooms_only():
    wrong = []
    for path, here in files():
        last = ROOMS.index(top(here)) if top(here) in ROOMS else ROOMS.index(ROOT[here])
        for there in imported(path):
            if top(there) in ROOMS:
                late = ROOMS.index(top(there)) > last
            elif top(there) in ROOT:  # settings stands behind the methods, api beside it, attachment behind decode
                late = last < ROOMS.index(ROOT[top(there)]) or top(here) == top(there)
            else:
                continue  # a name of the package's own: attach, score, __version__
            if late:
                wrong.append(f"{here} imports {there}")
    assert not wrong


def test_implementations_do_not_know_each_other():
    implementations = {"scoring.reference", "scoring.tiled", "scoring.triton"}
    for name in implementations:
        path = SOURCE / f"{name.replace('.', '/')}.py"
        assert not implementations & set(imported(path)), name
    oracle = SOURCE / "lab" / "theory" / "oracle.py"
    assert not list(imported(oracle)), "the oracle shares no code"


def test_only_rooms_that_hold_models_know_transformers():
    for path, here in files():
        names = {n.module or "" for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)}
        if any(top(name) == "transformers" for name in names):
            assert top(here) in KNOW_TRANSFORMERS, here


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("decantkv.models", "load", "decantkv.hf.loading"),
        ("decantkv.models", "chat_prompt", "decantkv.hf.loading"),
        ("decantkv.models", "convert_gguf", "decantkv.hf.loading"),
        ("decantkv.records", "format_bytes", "decantkv.cache.report"),
        ("decantkv.eval.lm_eval", "DecantLM", "decantkv.lab.eval.lm_eval"),
    ],
)
def test_paths_that_documents_showed_still_work_and_warn(old, name, new):
    code = (
        "import importlib, warnings\n"
        f"old = importlib.import_module({old!r})\n"
        "with warnings.catch_warnings(record=True) as heard:\n"
        "    warnings.simplefilter('always')\n"
        f"    found = old.{name}\n"
        f"print(found is importlib.import_module({new!r}).{name}, {new!r} in str(heard[0].message), heard[0].category)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True True <class 'DeprecationWarning'>"


@pytest.mark.parametrize("name", ["EvictingCache", "deferred", "cache_argument", "cache_bytes"])
def test_the_cache_room_gives_what_users_hold(name):
    import decantkv.cache

    assert callable(getattr(decantkv.cache, name))


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


@pytest.mark.parametrize("code", ["exec('raise_signal(SIGINT)')", "try_to_load()"])
def test_ctrl_c_exits_with_130_wherever_it_comes(code):
    code = (
        "from signal import SIGINT, default_int_handler, raise_signal, signal\n"
        "signal(SIGINT, default_int_handler)\n"  # a shell's background jobs inherit none
        "import decantkv.__main__ as program, decantkv.cli as cli\n"
        "def try_to_load():\n"
        "    try: raise_signal(SIGINT)\n"
        "    except KeyboardInterrupt: raise ImportError('initialization failed')\n"
        f"cli.build = lambda: {code}\n"
        "program.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130


MISSING = ("typer", "rich", "click", "shellingham", "markdown_it", "pygments", "mdurl", "accelerate", "scipy")
WITHOUT = f"""
import sys
class Passing:
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, *rest):
        return None if name.split(".")[0] in {MISSING} else self.finder.find_spec(name, *rest)
    def __getattr__(self, name): return getattr(self.finder, name)
sys.meta_path = [Passing(finder) for finder in sys.meta_path]
"""


def without_extras(code):
    return subprocess.run([sys.executable, "-c", WITHOUT + code], capture_output=True, text=True)


def test_attach_and_generate_need_the_core_dependencies_alone():
    code = (
        "import decantkv, decantkv.hf.loading\n"
        "from tests.support import tiny\n"
        "model, ids = tiny.llama(), tiny.prompt(60)\n"
        "with decantkv.attach(model, budget=0.5) as run:\n"
        "    model.generate(ids, max_new_tokens=4, do_sample=False)\n"
        "assert run.report().layers\n"
        "print(*(name for name in sys.modules if name.startswith('decantkv')))"
    )
    done = without_extras(code)
    assert done.returncode == 0, done.stderr
    needed = set()
    for name in done.stdout.split():
        path = SOURCE.joinpath(*name.split(".")[1:])
        tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                needed.add(top(node.module or ""))
            elif isinstance(node, ast.Import):
                needed |= {top(alias.name) for alias in node.names}
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
    declared = {Requirement(text).name for text in project["dependencies"]}
    assert needed - sys.stdlib_module_names - {"decantkv"} == declared


@pytest.mark.parametrize(
    "code", ["import decantkv.__main__ as command; command.main()", "import decantkv.lab.eval.cli"]
)
def test_what_needs_an_extra_names_it(code):
    done = without_extras(code)
    assert done.returncode == (2 if "main" in code else 1)
    assert "pip install 'decantkv[cli]'" in done.stderr.splitlines()[-1]
    assert "main" not in code or done.stderr.count("\n") == 1
