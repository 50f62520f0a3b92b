"""What keeps the package easy to follow: few fields that change, short functions, a short walk, fields in one place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import decantkv
from tests.support import walk

PACKAGE = Path(decantkv.__file__).parent
CACHE = PACKAGE / "cache"
MOST_FIELDS = 12
OF_A_LAYER = {"phase", "chunks", "unmasked", "postponed", "noted"}  # and of its phases
OF_STORES = {"settled", "whole", "valid", "real", "fresh"}


def fields_that_change(tree):
    """Each class that is not frozen, with the attributes that it sets."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        if any("frozen=True" in ast.unparse(x) for x in node.decorator_list):
            continue
        if any(ast.unparse(base) in ("NamedTuple", "Protocol") for base in node.bases):
            continue
        found = {
            x.attr
            for x in ast.walk(node)
            if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store) and ast.unparse(x.value) == "self"
        }
        if any("dataclass" in ast.unparse(x) for x in node.decorator_list):
            found |= {ast.unparse(x.target) for x in node.body if isinstance(x, ast.AnnAssign)}
        yield node.name, found


@pytest.mark.parametrize("path", sorted(CACHE.rglob("*.py")), ids=lambda path: path.name)
def test_no_class_of_the_cache_has_more_than_twelve_fields_that_change(path):
    for name, found in fields_that_change(ast.parse(path.read_text())):
        assert len(found) <= MOST_FIELDS, f"{name}: {sorted(found)}"


def test_no_function_of_the_library_is_longer_than_eighty_lines():
    long = []
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        for node in ast.walk(ast.parse(path.read_text())) if room not in ("kernels", "lab") else ():
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 80:
                long.append(f"{path.name}: {node.name}")
    assert not long


@pytest.mark.parametrize("file", ["files.py", "concat.py", "memory.py", "../decode/graphs.py"])
def test_files_concat_and_graphs_set_no_field_of_a_layer_or_store(file):
    tree = ast.parse((CACHE / file).read_text())
    names = {x.attr for x in ast.walk(tree) if isinstance(x, ast.Attribute)}
    assert not names & OF_STORES
    written = {
        x.attr
        for x in ast.walk(tree)
        if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store) and ast.unparse(x.value) != "self"
    }
    assert not written & (OF_A_LAYER - {"unmasked", "postponed", "noted"})  # those three are for graphs


def test_one_layer_reading_one_prompt_is_a_short_walk():
    steps = walk.of_a_layer()
    assert walk.jumps(steps) <= 54
    assert len(set(steps)) <= 80
