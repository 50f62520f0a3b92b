"""Draw docs/kept.svg, the README's picture, from the demo's own prompt.  python docs/picture.py MODEL"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch

from decantkv import EvictingCache
from decantkv.cache.evicting_cache import cache_argument
from decantkv.hf.loading import load

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "demo"))
demo = importlib.import_module("demo")  # the same document, fact and budget

BINS = 160


@torch.no_grad()
def kept_map(model: Any, tokenizer: Any, inputs: Any, method: str) -> tuple[torch.Tensor, bool]:
    """[layers, BINS] the share of heads and tokens that each stretch of the prompt keeps, and whether it was right."""
    cache = EvictingCache(model, method, budget=demo.BUDGET)
    options = {cache_argument(model): cache, "max_new_tokens": demo.NEW_TOKENS, "do_sample": False}
    output = model.generate(**inputs, **options)
    length = inputs["input_ids"].shape[1]
    right = demo.CODE in tokenizer.decode(output[0, length:])
    rows = torch.stack([layer.kept.mask(length)[0].float().mean(0) for layer in cache.layers])
    return torch.stack([part.mean(-1) for part in rows.tensor_split(BINS, dim=-1)], dim=-1), right


def main(model_path: str) -> None:
    """Two maps, one colour scale, the planted sentence marked."""
    model, tokenizer = load(model_path)
    prompt = demo.build_prompt(tokenizer, (HERE.parent / "demo" / "constitution.txt").read_text(encoding="utf-8"))
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    length = inputs["input_ids"].shape[1]
    before = len(tokenizer(prompt[: prompt.index(demo.FACT)], add_special_tokens=False)["input_ids"])
    plt.switch_backend("svg")
    figure, axes = plt.subplots(2, 1, figsize=(9, 3.6), sharex=True, layout="constrained")
    for axis, method in zip(axes, ("dropkv", "random"), strict=True):
        kept, right = kept_map(model, tokenizer, inputs, method)
        image = axis.imshow(kept, aspect="auto", cmap="cividis", vmin=0, vmax=0.6, extent=(0, length, len(kept), 0))
        axis.set_ylabel("layer")
        said = f"{demo.CODE}, right" if right else "wrong"
        axis.set_title(f"{method}, {demo.BUDGET:.0%} of the cache kept: answers {said}", loc="left", fontsize=10)
    axes[0].annotate(
        "the planted sentence", (before + 8, 30), (before + 8, 37), fontsize=8, ha="center", annotation_clip=False,
        arrowprops={"arrowstyle": "->"},
    )  # fmt: skip
    axes[1].set_xlabel(f"position in the prompt ({length:,} tokens; the question is at the right end)", labelpad=4)
    figure.colorbar(image, ax=axes, label="share of heads that keep it", shrink=0.8)
    figure.savefig(HERE / "kept.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1])
