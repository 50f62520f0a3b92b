"""One rank of a tensor-parallel run.

`python -m tests.support.ranks MODEL_FOLDER OUT_FOLDER` runs under a launcher's environment.

Writes what it kept, said and exchanged to OUT_FOLDER/rank<n>.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from transformers import LlamaForCausalLM

import decantkv
from decantkv.cache.layer import EvictingLayer
from decantkv.selection.selector import select
from decantkv.selection.tensor_parallel import Peers
from tests.support import tiny
from tests.support.families import at_least
from tests.support.judge import kept_masks, logits_with

STEPS = [torch.tensor([[7]]), torch.tensor([[11]]), torch.tensor([[3, 5]])]
ONE, PADDED = {"input_ids": tiny.prompt(120)}, tiny.left_padded([tiny.prompt(120, seed=1), tiny.prompt(50, seed=2)])
# each head decides for itself, so nothing is exchanged
ALONE = {
    "one": ({}, ONE),
    "padded": ({}, PADDED),
    "weighed by W_O": ({"method": "criticalkv"}, ONE),
    "pyramid": ({"method": "pyramidkv"}, ONE),
}
# heads agree or compete: one exchange a layer
TOGETHER = {
    "shared": ({"allocation": "shared"}, ONE),
    "shared, padded": ({"allocation": "shared"}, PADDED),
    "tova": ({"method": "tova"}, PADDED),
    "ada": ({"method": "adadropkv"}, ONE),
    "ada, padded": ({"method": "adakv"}, PADDED),
    "ada of two stages": ({"method": "criticalkv", "allocation": "ada"}, ONE),
    "ada-kvpress": ({"allocation": "ada-kvpress"}, PADDED),
    "heads": ({"allocation": "heads"}, PADDED),
}
PROMPTS = {**ALONE, **TOGETHER}
LAYERS = 3
EXCHANGES = ["all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "barrier",
             "broadcast_object_list", "reduce_scatter_tensor", "all_to_all_single", "send", "recv"]  # fmt: skip


def across_ranks(folder: str) -> transformers.PreTrainedModel:
    """The model, each rank with its own heads."""
    if at_least("5.24"):
        from transformers.distributed import DistributedConfig

        model = LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
    else:
        model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto")
    return model.eval()


class CountExchanges:
    """Calls of torch.distributed made while a layer decides what to keep, and all of them."""

    def __init__(self) -> None:
        self.deciding = self.all = 0
        self._inside = False
        keep = EvictingLayer._decide

        def watched(layer: EvictingLayer, *args: object) -> None:
            self._inside = True
            keep(layer, *args)
            self._inside = False

        EvictingLayer._decide = watched
        for name in EXCHANGES:
            setattr(dist, name, self._count(getattr(dist, name)))
        for name in [n for n in vars(dist.distributed_c10d) if n in EXCHANGES]:
            setattr(dist.distributed_c10d, name, getattr(dist, name))
        functional = torch.distributed._functional_collectives
        for name in ("all_reduce", "all_gather_tensor", "reduce_scatter_tensor", "broadcast"):
            setattr(functional, name, self._count(getattr(functional, name)))

    def _count(self, call):
        def counted(*args, **kwargs):
            self.all += 1
            self.deciding += self._inside
            return call(*args, **kwargs)

        return counted


def read(model, cache, inputs):
    """Logits after a prompt and after some steps, and which tokens each layer kept."""
    inputs = {name: x.to(model.device) for name, x in inputs.items()}
    rows = inputs["input_ids"].shape[0]
    logits = logits_with(model, cache, inputs, [step.expand(rows, -1).to(model.device) for step in STEPS])
    return logits.cpu(), {layer: mask.cpu() for layer, mask in kept_masks(cache, 120).items()}


def selections():
    """Scores [B, 4, N] of both processes' heads with many ties, and what is asked of them."""
    rng = torch.Generator().manual_seed(3)
    for allocation in ("shared", "ada", "ada-kvpress", "heads"):
        for high, lengths, n_keep in ((3, None, 9), (50, [40, 23], [11, 5]), (2, [40, 7], [40, 6])):
            scores = torch.randint(0, high, (2, 4, 40), generator=rng).float() / 8
            scores[:, 1] *= 10  # one head wins most
            options = {"allocation": allocation, "lengths": lengths, "n_keep": n_keep, "window": 2, "sinks": 1}
            yield scores, options


def select_own(scores, **options):
    """[B, 2, N] bool: what this process keeps for its two heads."""
    peers = Peers(dist.group.WORLD, dist.get_world_size(), dist.get_rank())
    return select(scores.chunk(2, 1)[dist.get_rank()], peers=peers, **options).mask(scores.shape[2])


def main(folder: str, out: str) -> None:
    exchanges = CountExchanges()
    model = across_ranks(folder)
    exchanges.all = 0
    found = {}
    for name, (settings, inputs) in PROMPTS.items():
        exchanges.deciding = 0
        cache = decantkv.EvictingCache(model, **settings, budget=0.2)
        logits, kept = read(model, cache, inputs)
        found[name] = {"logits": logits, "kept": kept, "deciding": exchanges.deciding}
    exchanges.deciding = 0
    prompt = tiny.prompt(120).to(model.device)
    with decantkv.attach(model, budget=0.2):
        found["generated"] = model.generate(prompt, max_new_tokens=6, **tiny.GREEDY).cpu()
    found["exchanges"], found["deciding"] = exchanges.all, exchanges.deciding
    with decantkv.attach(model, allocation="shared", budget=26, every=4) as run:
        found["renewed"] = model.generate(prompt, max_new_tokens=14, **tiny.GREEDY).cpu()
        found["rounds"] = run.report().rounds
    found["chosen"] = [select_own(scores.to(model.device), **options).cpu() for scores, options in selections()]
    found["device"] = model.device.type
    refused = {}
    for settings in ({"allocation": "layer"}, {"method": "criticalkv", "allocation": "shared"}):
        try:
            decantkv.attach(model, budget=0.2, **settings)
        except ValueError as error:
            refused[str(settings)] = str(error)
    found["refused"] = refused
    torch.save(found, Path(out) / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
