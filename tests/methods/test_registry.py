"""Methods and allocation rules of other packages, by name."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import decantkv
from decantkv.base import plugins
from decantkv.base.options import RUN_OPTIONS
from decantkv.lab.eval.engine.policy import parse_policy
from decantkv.lab.eval.engine.reading import Reader
from decantkv.methods import METHODS, resolve
from decantkv.methods.table import table
from decantkv.selection.allocation import RULES, Heads
from tests.support import tiny


@dataclass(frozen=True)
class Loudest(decantkv.Method):
    """Keep the largest values."""

    name: ClassVar[str] = "loudest"
    kind: ClassVar[str] = "heuristic"
    source: ClassVar[str] = "this test"
    formula: ClassVar[str] = "‖v‖"
    window: int = 2

    def score(self, win, *, impl="auto"):
        return win.v.norm(dim=-1).float()


@dataclass(frozen=True)
class MyHeads(Heads):
    """Heads compete, under a name of its own."""

    name: ClassVar[str] = "my-heads"


@pytest.fixture
def registries(monkeypatch):
    monkeypatch.setattr("decantkv.methods.METHODS", dict(METHODS))
    monkeypatch.setattr("decantkv.selection.allocation.RULES", dict(RULES))


def kept(method, **options):
    model, cache = tiny.llama(), None
    cache = decantkv.EvictingCache(model, method, budget=20, **options)
    with torch.no_grad():
        model(tiny.prompt(60), **{decantkv.cache_argument(model): cache})
    return cache


def test_a_registered_method_and_rule_work_by_name_and_in_saved_files(registries, tmp_path):
    assert decantkv.register_method(Loudest) is Loudest
    decantkv.register_allocation(MyHeads())
    cache, same = kept("loudest", allocation="my-heads"), kept(Loudest(), allocation=Heads())
    for a, b in zip(cache.layers, same.layers, strict=True):
        assert torch.equal(a.kept.indices, b.kept.indices)
    assert any(row.name == "loudest" for row in table())
    model = tiny.llama()
    path = tmp_path / "cache.safetensors"
    cache = decantkv.EvictingCache(model, "loudest", budget=20, allocation="my-heads")
    with torch.no_grad():
        model(tiny.prompt(60), **{decantkv.cache_argument(model): cache})
    cache.save(path)
    loaded = decantkv.EvictingCache.load(path, model)
    assert loaded.settings == cache.settings
    assert decantkv.register_method(Loudest) is Loudest  # once more does no harm


def test_a_registered_method_and_rule_are_evaluated_by_name(registries):
    decantkv.register_method(Loudest)
    decantkv.register_allocation(MyHeads())
    model, settings = tiny.llama(), parse_policy("loudest[allocation=my-heads]").settings("20")
    reader = Reader(model, rows=settings.rows, needs=settings.method.needs)
    for cut in reader.read(tiny.prompt(60)[0].tolist(), []):
        cut.score(settings)
    copy = reader.reading().whole.copy(settings)
    cache = kept("loudest", allocation="my-heads", decode="own")
    for store, layer in zip(copy.stores, cache.layers, strict=True):
        assert torch.equal(store.lens, layer.store.lens)
        torch.testing.assert_close(store.keys, layer.store.keys)


@dataclass(frozen=True)
class Short(Loudest):
    """Scores all keys but the last."""

    name: ClassVar[str] = "short"

    def score(self, win, *, impl="auto"):
        return super().score(win)[..., :-1]


@dataclass(frozen=True)
class Flat(Loudest):
    """Scores without heads."""

    name: ClassVar[str] = "flat"

    def score(self, win, *, impl="auto"):
        return super().score(win)[:, 0]


@pytest.mark.parametrize(("method", "got"), [(Short(), r"\[1, 2, 59\]"), (Flat(), r"\[1, 60\]")])
def test_scores_of_another_shape_are_refused(method, got):
    with pytest.raises(ValueError, match=rf"score: expected scores \[B, H, N\] of \[1, 2, 60\], got {got}"):
        kept(method)


OF_FILE = """
from dataclasses import dataclass
from typing import ClassVar

import decantkv


@dataclass(frozen=True)
class Mine(decantkv.Method):
    name: ClassVar[str] = "mine"
    kind: ClassVar[str] = "heuristic"
    source: ClassVar[str] = "this file"
    formula: ClassVar[str] = "‖v‖"
    presets: ClassVar[dict] = {"wide": {"window": 5}}
    window: int = 2

    def score(self, win, *, impl="auto"):
        return win.v.norm(dim=-1).float()
"""


def test_a_class_of_a_file_is_a_method(registries, tmp_path):
    path = tmp_path / "my_methods.py"
    path.write_text(OF_FILE)
    cache, same = kept(f"{path}:Mine", window=3), kept(Loudest(window=3))
    for ours, theirs in zip(cache.layers, same.layers, strict=True):
        assert torch.equal(ours.kept.indices, theirs.kept.indices)
    assert resolve("mine", window=4) == resolve(f"{path}:Mine", window=4)
    assert resolve(f"{path}:Mine:wide").window == 5
    for name, message in (
        (f"{path}:Other", "method: expected a class of .*, got 'Other', which it does not define"),
        (f"{tmp_path}/none.py:Mine", "method: expected a Python file, got"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve(name)
    (tmp_path / "broken.py").write_text("import nothing_of_that_name")
    with pytest.raises(ValueError, match=r"method: expected .*broken.py to load, got ModuleNotFoundError"):
        resolve(f"{tmp_path}/broken.py:Mine")


def test_a_file_names_a_method_that_is_not_registered(registries, tmp_path):
    with pytest.raises(ValueError, match=r"method: expected one that is registered \(decantkv.register_method\)"):
        kept(Loudest()).save(tmp_path / "cache.safetensors")
    with pytest.raises(ValueError, match=r"allocation: expected one that is registered"):
        kept("dropkv", allocation=MyHeads()).save(tmp_path / "cache.safetensors")


def test_installed_packages_add_methods_and_rules(registries, monkeypatch):
    added = {"decantkv.methods": (Loudest,), "decantkv.allocations": (MyHeads(),)}
    monkeypatch.setattr("decantkv.methods.plugins", lambda group: added[group])
    monkeypatch.setattr("decantkv.selection.allocation.plugins", lambda group: added[group])
    assert kept("loudest", allocation="my-heads").settings.method == Loudest()


def test_a_plugin_that_cannot_be_loaded_is_named(monkeypatch):
    broken = [plugins.entry_points.__globals__["EntryPoint"]("x", "no_such_module:x", "decantkv.methods")]
    monkeypatch.setattr(plugins, "entry_points", lambda group: broken)
    with pytest.raises(ValueError, match=r"decantkv.methods: expected 'no_such_module:x' to load, got ModuleNotFound"):
        plugins.plugins.__wrapped__("decantkv.methods")


@pytest.mark.parametrize(
    ("attributes", "error", "message"),
    [
        ({"name": "Two Words"}, ValueError, "Bad.name: expected small letters"),
        ({"name": 3}, TypeError, "Bad.name: expected text"),
        ({"name": "bad", "kind": "magic"}, ValueError, "Bad.kind: expected one of"),
        ({"name": "bad", "by_window": "no"}, TypeError, "Bad.by_window: expected True or False"),
        ({"name": "bad", "presets": [1]}, TypeError, "Bad.presets: expected a mapping"),
    ],
    ids=str,
)
def test_class_attributes_are_checked_when_the_class_is_defined(attributes, error, message):
    with pytest.raises(error, match=message):
        type("Bad", (decantkv.Method,), attributes)


def test_what_is_no_whole_method_is_not_registered(registries):
    score = Loudest.score
    whole = {"name": "other", "kind": "heuristic", "source": "a", "formula": "b", "score": score}
    made = lambda **without: dataclass(frozen=True)(type("Other", (decantkv.Method,), {**whole, **without}))  # noqa: E731
    decantkv.register_method(made())
    for wrong, error, message in [
        (Loudest(), TypeError, "expected a class that derives from decantkv.Method"),
        (type("Other", (decantkv.Method,), whole), TypeError, "to be a frozen dataclass"),
        (dataclass(frozen=True)(type("Other", (decantkv.Method,), {"name": "other"})), TypeError, "to define score"),
        (made(name="dropkv"), ValueError, "expected a name that is free, got 'dropkv', which is DropKV"),
    ]:
        with pytest.raises(error, match=message):
            decantkv.register_method(wrong)
    with pytest.raises(TypeError, match="an AllocationRule whose class has a name of its own"):
        decantkv.register_allocation("ada")
    taken = dataclasses.make_dataclass("Ada", [], bases=(Heads,), frozen=True, namespace={"name": "ada"})
    with pytest.raises(ValueError, match="expected a name that is free, got 'ada'"):
        decantkv.register_allocation(taken())


def test_a_typo_is_answered_with_the_nearest_option_of_method_and_run():
    with pytest.raises(TypeError, match=r"max_kv_token: .*did you mean 'max_kv_tokens'\?"):
        resolve("dropkv", max_kv_token=9)
    with pytest.raises(TypeError, match=r"kernel_sise: .*did you mean 'kernel_size'\?"):
        resolve("dropkv", kernel_sise=9)
    keywords = inspect.signature(decantkv.attach).parameters.values()
    assert tuple(p.name for p in keywords if p.kind is p.KEYWORD_ONLY) == RUN_OPTIONS
    with pytest.raises(ValueError, match=r"allocation: .*did you mean 'uniform'\?"):
        decantkv.EvictingCache(tiny.llama(), budget=0.5, allocation="uniforn")
