"""Changes to `generate` while eviction is on: drafts wait for the prompt, eviction waits for the last chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers.cache_utils import DynamicCache

_VERSION = Version(Version(transformers.__version__).base_version)


def first_the_prompt(make: Callable[..., Any]) -> Callable[..., Any]:
    """Make assisted decoding read the prompt alone before the first draft.

    Otherwise one forward would hold both, and eviction would score the draft's tokens as part of the prompt.
    """

    def make_generator(**kwargs: Any) -> Any:
        generator = make(**kwargs)
        # a generator that wants the model's outputs has none to look at before the prompt
        return generator if getattr(generator, "requires_model_outputs", False) else _PromptFirst(make, kwargs)

    return make_generator


class _PromptFirst:
    """A candidate generator that proposes nothing the first time and builds the real one after the prompt was read."""

    requires_model_outputs = False

    def __init__(self, make: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        self._make, self._kwargs = make, kwargs
        self._generator: Any = None
        self._asked = False

    def get_candidates(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return no candidates the first time; afterwards those of the real generator."""
        if not self._asked:
            self._asked = True
            return input_ids, None
        if self._generator is None:
            model_kwargs = _carry(self._kwargs.get("model_kwargs", {}), input_ids)
            carried = {"input_ids": input_ids, "inputs_tensor": input_ids, "model_kwargs": model_kwargs}
            self._generator = self._make(**{**self._kwargs, **carried})
        return self._generator.get_candidates(input_ids, *args, **kwargs)

    def update_candidate_strategy(self, *args: Any, **kwargs: Any) -> None:
        """Pass the number of accepted candidates to the real generator."""
        if self._generator is not None:
            self._generator.update_candidate_strategy(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


def _carry(model_kwargs: dict[str, Any], input_ids: torch.Tensor) -> dict[str, Any]:
    """Return the arguments for a candidate generator, with masks extended to the length of `input_ids`.

    transformers extends masks and positions in the dictionary that it passed at first; until 4.57 in a copy of it.
    """
    carried = {name: value for name, value in model_kwargs.items() if name != "cache_position"}
    mask = carried.get("attention_mask")
    if mask is not None and mask.shape[1] < input_ids.shape[1]:
        carried["attention_mask"] = torch.nn.functional.pad(mask, (0, input_ids.shape[1] - mask.shape[1]), value=1)
    return carried


def refuse_continuous_batching(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that refuses continuous batching, to stand in for its entry points."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "continuous batching: expected generate() beside attach, got a paged cache, which eviction cannot reach"
        )

    return refuse


def is_chunked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether one of the arguments is a generation configuration with `prefill_chunk_size`."""
    return any(getattr(a, "prefill_chunk_size", None) for a in (*args, *kwargs.values()))


def check_chunks(cache: DynamicCache) -> None:
    """Raise if transformers would read a prompt's beginning into the cache a second time.

    Raises:
        ValueError: a later turn in chunks, which transformers cannot do before 5.24.
    """
    length = cache.get_seq_length()
    if length > 0 and Version("5.24") > _VERSION:
        raise ValueError(
            f"prefill_chunk_size: expected an empty cache before transformers 5.24, which would read its tokens "
            f"again, got one of {length} tokens"
        )


def number_chunk(kwargs: dict[str, Any], cache: DynamicCache) -> None:
    """Set a chunk's position ids to its tokens' positions in the prompt.

    Before 5.12 transformers gives every chunk the positions of the prompt's end, and 4.x counts pads as tokens.
    """
    if Version("5.12") <= _VERSION or kwargs.get("input_ids") is None:
        return
    ids, mask, past = kwargs["input_ids"], kwargs.get("attention_mask"), cache.get_seq_length()
    position = kwargs.get("position_ids")
    if position is not None and position.dim() != 2:  # several numbers per token: images
        return
    if mask is None:
        mask = torch.ones(ids.shape[0], past + ids.shape[1], dtype=torch.long, device=ids.device)
    kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
