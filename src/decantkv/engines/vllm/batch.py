"""The requests of the current step: set by the model runner, read by the metadata builders in the same thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Batch:
    """The requests of one step, a row each.

    Attributes:
        request_ids: the request of each row.
        prompt_lens: [rows] int, prompt tokens of each; tokens that a resumed request had generated are not counted.
        alive: every request that the worker holds, in this step or not.
    """

    request_ids: Sequence[str]
    prompt_lens: npt.NDArray[np.int64]
    alive: Container[str]


_here = threading.local()


def current() -> Batch | None:
    """Return the batch whose metadata is being built, or None for a dummy run."""
    batch: Batch | None = getattr(_here, "batch", None)
    return batch


@contextmanager
def told(batch: Batch | None) -> Iterator[None]:
    """Return a context in which `current` returns `batch`."""
    before, _here.batch = current(), batch
    try:
        yield
    finally:
        _here.batch = before


def watch(runner: Any) -> None:
    """Make the model runner, V1 or V2, set the current batch from now on."""
    if hasattr(runner, "_build_attention_metadata"):
        _watch_v1(runner)
    else:
        _watch_v2(runner)


def _watch_v1(runner: Any) -> None:
    build: Callable[..., Any] = runner._build_attention_metadata

    def build_attention_metadata(*args: Any, **kwargs: Any) -> Any:
        real = kwargs.get("num_scheduled_tokens") is not None  # dummy runs and captures schedule nothing
        with told(_batch_v1(runner) if real else None):
            return build(*args, **kwargs)

    runner._build_attention_metadata = build_attention_metadata


def _batch_v1(runner: Any) -> Batch:
    rows = runner.input_batch
    number = rows.num_reqs
    return Batch(rows.req_ids[:number], rows.num_prompt_tokens[:number].astype(np.int64), runner.requests)


def _watch_v2(runner: Any) -> None:
    """Watch runner V2, which builds metadata in another object, after it has gathered the batch's block tables."""
    real: Callable[..., Any] = runner.prepare_attn
    dummy: Callable[..., Any] = runner.prepare_dummy_attn

    def prepare_attn(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        states = runner.req_states
        lengths = states.prompt_len.np[input_batch.idx_mapping_np].astype(np.int64)
        _here.batch = Batch(input_batch.req_ids, lengths, states.req_id_to_index)
        return real(input_batch, *args, **kwargs)

    def prepare_dummy_attn(*args: Any, **kwargs: Any) -> Any:
        _here.batch = None
        return dummy(*args, **kwargs)

    runner.prepare_attn, runner.prepare_dummy_attn = prepare_attn, prepare_dummy_attn
