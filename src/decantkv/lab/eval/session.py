"""One run of `decantkv eval`: what is measured, on what, under which circumstances."""

from __future__ import annotations

import copy
import hashlib
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedModel

from decantkv.cli.console import Console
from decantkv.hf import loading
from decantkv.hf.context import check_context, context_limit
from decantkv.lab.eval import fingerprints, niah, probes, ruler
from decantkv.lab.eval.chat import ChatFormat
from decantkv.lab.eval.engine.policy import describe
from decantkv.lab.eval.fidelity import Passages
from decantkv.lab.eval.longbench import load as longbench
from decantkv.lab.eval.longbench.tasks import TASKS as LONGBENCH_TASKS
from decantkv.lab.eval.longbench.tasks import check_task as check_longbench
from decantkv.lab.eval.results import Store
from decantkv.lab.eval.runner import Plan, Prompt, Runner, cache_memory
from decantkv.lab.eval.sample import Sample
from decantkv.lab.provenance import commit, device_name, versions

PACKAGES = ("decantkv", "torch", "transformers", "tokenizers", "wonderwords", "rouge", "triton")
LONGBENCH_MARGIN = 500  # tokens that LongBench leaves for template and answer


@dataclass(frozen=True)
class Sources:
    """Files given on the command line."""

    haystack: Path | None = None
    squad: Path | None = None
    hotpot: Path | None = None
    longbench: Path | None = None
    openings: int = 1  # places of the haystack at which prompts begin


@dataclass(frozen=True)
class Opened:
    """The runner and the prompts of an open session."""

    runner: Runner
    prompts: list[Prompt]
    store: Store

    @property
    def cells(self) -> int:
        """Answers wanted, those that are there included."""
        return sum(len(self.runner.plan.cells(key)) for key, _ in self.prompts)


@dataclass(frozen=True)
class Session:
    """A suite on a model; `run` measures it.

    Attributes:
        model: as given to `decantkv.hf.loading.load`.
        suite, tasks: tasks empty means all of the suite's.
        lengths, samples: prompts of each task and length; 0 samples means the suite's default.
        yarn: factor by which RoPE is stretched; 1 leaves it.
        note: said in every table.
        beyond_context: whether lengths beyond the model's context are allowed.
        part: (k, n) measures every n-th prompt from the k-th on, counted from 1; `results.join` puts parts together.
    """

    model: str
    suite: str
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int
    sources: Sources
    seed: int = 42
    dtype: str = ""
    yarn: float = 1.0
    system: str | None = None
    note: str = ""
    beyond_context: bool = False
    part: tuple[int, int] = (1, 1)

    def run(
        self,
        plan: Plan,
        out: Path,
        *,
        command: str,
        minutes: float = 0.0,
        memory: int | None = None,
        graphs: bool | None = None,
    ) -> bool:
        """Measure what `out` lacks; True when everything is there, False when the time ran out first."""
        begun, deadline = time.time(), time.monotonic() + 60 * minutes if minutes else None
        console = Console(stderr=True)
        texts = self.texts()
        with console.status(f"loading {escape(self.model)}"):
            loaded = self.load(texts)
        memory = cache_memory(loaded[0].device, memory)
        opened = self.open(loaded, texts, plan, out, command=command, begun=begun, memory=memory, graphs=graphs)
        try:
            with progress_bar(console) as bar:
                task = bar.add_task(self.suite, total=opened.cells)
                whole = opened.runner.run(
                    opened.prompts, opened.store, deadline=deadline, progress=lambda n: bar.advance(task, n)
                )
        finally:
            opened.store.close()
        return whole

    def load(self, texts: ruler.Sources | None = None) -> tuple[PreTrainedModel, Any]:
        """The model and its tokenizer.

        Args:
            texts: of `texts`; given, every length is tried with its tasks before the weights are read.
        """

        def check(config: Any, tokenizer: Any) -> None:
            if texts is not None and self.suite == "ruler":
                for series in self._series(ChatFormat(tokenizer, system=self.system), texts):
                    series.check()

        model, tokenizer = loading.load(self.model, dtype=self.dtype, check=check)
        if self.yarn != 1.0:
            stretch(model, self.yarn)
        self._check_context(model)
        return model, tokenizer

    def open(
        self,
        loaded: tuple[PreTrainedModel, Any],
        texts: ruler.Sources,
        plan: Plan,
        out: Path,
        *,
        command: str,
        begun: float,
        **options: Any,
    ) -> Opened:
        """Everything that measuring takes, the folder open for more.

        Args:
            loaded: of `load`; texts: of `texts`.
            begun: `time.time()` when the run began; processes of one run give the same.
            options: `Runner`'s.
        """
        model, tokenizer = loaded
        form = ChatFormat(tokenizer, system=self.system)
        apart = ChatFormat(copy.deepcopy(tokenizer), system=self.system)  # prompts are made in a thread of their own
        first, every = self.part
        prompts = list(self._prompts(apart, texts))[first - 1 :: every]
        circumstances = self._circumstances(model, plan, command, begun)
        store = Store(out, self._configuration(model, tokenizer, texts), circumstances)
        runner = Runner(model, form, plan, stops=stop_tokens(model, tokenizer), **options)
        return Opened(runner, prompts, store)

    def _check_context(self, model: PreTrainedModel) -> None:
        limit, longest = context_limit(model.config), max(self.lengths, default=0)
        if limit is not None and longest > limit and self.beyond_context:
            message = f"length: expected at most the model's {limit:,} tokens, got {longest:,}"
            warnings.warn(message, stacklevel=2)
        check_context(
            model.config, longest, "length", beyond=self.beyond_context, way_out=", --yarn stretches the context"
        )

    def texts(self) -> ruler.Sources:
        """The suite's files, read before the model is loaded, so that a broken one costs no time."""
        given = self.sources
        haystack = ruler.load_haystack(given.haystack, given.openings) if given.haystack is not None else None
        if self.suite != "ruler":
            return ruler.Sources(haystack=haystack)
        names = [ruler.check_task(name) for name in self.tasks or ruler.TASKS]
        if haystack is None and any(ruler.Sources().missing(name) for name in names if name.startswith("niah")):
            haystack = ruler.hub_haystack(given.openings)
        questions = {
            name: ruler.load_questions(file) if file is not None else ruler.hub_questions(name)
            for name, file in (("qa_1", given.squad), ("qa_2", given.hotpot))
            if name in names
        }
        return ruler.Sources(haystack, questions.get("qa_1"), questions.get("qa_2"))

    def _prompts(self, form: ChatFormat, texts: ruler.Sources) -> Iterator[Prompt]:
        """Every prompt of the run, tasks taking turns, so that a run that stops early is balanced."""
        makers: dict[str, Callable[..., Iterator[Prompt]]] = {
            "ruler": self._ruler,
            "longbench": self._longbench,
            "fidelity": self._fidelity,
            "niah": self._niah,
            "probes": self._probes,
        }
        return makers[self.suite](form, texts)

    def _ruler(self, form: ChatFormat, texts: ruler.Sources) -> Iterator[Prompt]:
        every = self._series(form, texts)
        for length in self.lengths:
            here = [series for series in every if series.length == length]
            for index, series in product(range(self.samples), here):
                yield f"ruler/{series.task}/{length}/{index}", _later(series.sample, index)

    def _series(self, form: ChatFormat, texts: ruler.Sources) -> list[ruler.Series]:
        names = [ruler.check_task(name) for name in self.tasks or ruler.TASKS]
        return [
            ruler.Series(name, length, texts, measure=form.measure(), count_tokens=form.count, seed=self.seed)
            for length in self.lengths
            for name in names
        ]

    def _niah(self, form: ChatFormat, texts: ruler.Sources) -> Iterator[Prompt]:
        for length in self.lengths:
            grids = [
                niah.Grid(length, depth, form.measure(), texts.haystack, digits=4, seed=self.seed)
                for depth in niah.DEPTHS
            ]
            for index, grid in product(range(self.samples), grids):
                yield f"niah/{grid.task}/{length}/{index}", _later(grid.sample, index)

    def _fidelity(self, form: ChatFormat, texts: ruler.Sources) -> Iterator[Prompt]:
        if texts.haystack is None:
            raise ValueError("haystack: expected text to continue (--haystack FILE_OR_FOLDER) for the fidelity suite")
        for length in self.lengths:
            passages = Passages(texts.haystack, length, form.tokenizer)
            for index in range(self.samples):
                yield f"fidelity/text/{length}/{index}", _later(passages.sample, index)

    def _probes(self, form: ChatFormat, texts: ruler.Sources) -> Iterator[Prompt]:
        for length in self.lengths:
            made = [probes.Probe(name, length, form.measure(), texts.haystack, self.seed) for name in probes.TASKS]
            for index, probe in product(range(self.samples), made):
                yield f"probes/{probe.name}/{length}/{index}", _later(probe.sample, index)

    def _longbench(self, form: ChatFormat, texts: ruler.Sources) -> Iterator[Prompt]:
        names = [check_longbench(name) for name in self.tasks or LONGBENCH_TASKS]
        found: dict[str, list[Sample]] = {}
        for length, name in product(self.lengths, names):
            records = longbench.load_records(self.sources.longbench, name)
            found[name] = list(
                longbench.samples(
                    name, records, tokenizer=form.tokenizer, max_length=length, count=self.samples or None
                )
            )
        for index in range(max(map(len, found.values()), default=0)):
            for name in names:
                if index < len(found[name]):
                    yield found[name][index].key, _later(found[name].__getitem__, index)

    def _configuration(self, model: PreTrainedModel, tokenizer: Any, texts: ruler.Sources) -> dict[str, Any]:
        """All that makes rows comparable; a folder holds one."""
        sources = {name: texts.describe(name) for name in ("niah_single_2", "qa_1", "qa_2")}
        if self.suite == "longbench":
            sources["longbench"] = longbench.describe(self.sources.longbench)
        return {
            "suite": self.suite,
            "model": loading.name_of(self.model),
            "weights": fingerprints.of_model(self.model),
            "note": self.note,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": model.device.type,
            "chat_template": _sha(str(getattr(tokenizer, "chat_template", None))),
            "system": self.system,
            "yarn": self.yarn,
            "seed": self.seed,
            "sources": {name: source for name, source in sources.items() if source},
            "decoding": "greedy",
        }

    def _circumstances(self, model: PreTrainedModel, plan: Plan, command: str, begun: float) -> dict[str, Any]:
        """Return what a reader needs to repeat a session; it may differ between sessions of one configuration."""
        return {
            "command": command,
            "commit": commit(),
            "begun": datetime.fromtimestamp(begun, UTC).isoformat(timespec="milliseconds"),
            "device": device_name(model.device),
            "python": platform.python_version(),
            "versions": {name: version for name, version in versions(PACKAGES).items() if version is not None},
            "policies": {policy.label: describe(policy, "1.0") for policy in plan.policies},
            "budgets": list(plan.budgets),
            "regimes": list(plan.regimes),
        }


def stop_tokens(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """Token ids that end an answer: the model's own and the tokenizer's."""
    own = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = own if isinstance(own, list) else [own]
    return tuple(sorted({int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None}))


def stretch(model: PreTrainedModel, factor: float) -> None:
    """Give a loaded model YaRN's rotary frequencies (arXiv 2309.00071) for `factor` times its context.

    Raises:
        ValueError: the model's rotary embedding is not a plain one.
    """
    config = model.config.get_text_config(decoder=True)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if rope.get("rope_type", "default") != "default" or factor < 1:
        raise ValueError(
            f"yarn: expected a factor of at least 1 and a model without RoPE scaling, got {factor}, {rope}"
        )
    rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": config.max_position_embeddings}
    config.rope_parameters = rope
    decoder = model.get_decoder()
    decoder.rotary_emb = type(decoder.rotary_emb)(config).to(model.device)


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _later(make: Callable[[int], Sample], index: int) -> Callable[[], Sample]:
    return lambda: make(index)


def progress_bar(console: Console) -> Progress:
    """Answers made and to be made, with the time left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)
