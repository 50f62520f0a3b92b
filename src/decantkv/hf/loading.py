"""Load a model: from a hub id, a folder, or a GGUF file that is converted once."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from decantkv.base.chat import chat_prompt as chat_prompt  # what documents import from here
from decantkv.base.options import reason_of
from decantkv.base.terminal import note

GGUF_MAGIC = b"GGUF"
CONVERSION = 2  # of converted folders: the first one's may hold weights drawn at random
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    source: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    check: Callable[[Any, Any], None] = lambda config, tokenizer: None,
) -> tuple[PreTrainedModel, Any]:
    """Load a causal language model and its tokenizer for inference.

    Args:
        source: a model id, a folder written by `save_pretrained`, or a `.gguf` file. A GGUF's weights are
            dequantised and kept as safetensors in `cache_folder()`, so that only the first load is slow.
        dtype: of the weights, or its name in `DTYPES`. None or "": float32 on a CPU, where it is fastest, and the
            model's own on a GPU.
        device: where the model runs; None: the first GPU, or the CPU if there is none.
        check: a function that gets configuration and tokenizer before the weights are read, and may raise.

    Returns:
        The model in evaluation mode, and its tokenizer.

    Raises:
        ValueError: there is no model at `source`, or no dtype of that name.
        ModuleNotFoundError: `source` is a GGUF file, and the package gguf is not installed.
    """
    if isinstance(dtype, str) and dtype:
        if dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        dtype = DTYPES[dtype]
    place = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    path = Path(source)
    if path.is_file():
        path = convert_gguf(path)
    elif path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"model: expected a folder with a config.json, got {source}")
    name = str(path) if path.exists() else str(source)
    kind = dtype or (torch.float32 if place.type == "cpu" else "auto")
    expected = f"expected a model id, a model folder or a .gguf file, got {source}"
    with _one_line(expected):
        config, tokenizer = AutoConfig.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    check(config, tokenizer)
    with _one_line(expected), _no_bars():
        model = _whole(source, pretrained_model_name_or_path=name, dtype=kind)
    return model.to(place).eval(), tokenizer


@contextmanager
def _no_bars() -> Iterator[None]:
    """Hide transformers' progress bars, of which each load shows several."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _one_line(expected: str) -> Iterator[None]:
    """Turn any error while a file is read into a ValueError of one line; missing packages and memory are left alone."""
    try:
        yield
    except (ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith("model: expected"):
            raise
        raise ValueError(f"model: {expected}: {reason_of(error)}") from error


def _whole(source: str | Path, **arguments: Any) -> PreTrainedModel:
    """Return the model of `from_pretrained`, if the checkpoint holds exactly the model's weights.

    Raises:
        ValueError: weights are missing, left over or of another shape; transformers would draw them at random.
    """
    model, found = AutoModelForCausalLM.from_pretrained(**arguments, output_loading_info=True)
    for key, reason in (
        ("missing_keys", "lack"),
        ("mismatched_keys", "have in another shape"),
        ("unexpected_keys", "have beside the model's"),
        ("error_msgs", "could not convert"),
    ):
        if names := sorted({str(name[0] if isinstance(name, tuple) else name) for name in found.get(key) or ()}):
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(
                f"model: expected a checkpoint with every weight of a {type(model).__name__} and no other, got "
                f"{source}, whose files {reason} {', '.join(names[:3])}{more}"
            )
    loaded: PreTrainedModel = model
    return loaded


def convert_gguf(path: str | Path) -> Path:
    """Return the folder of a GGUF file's dequantised float32 weights; it is written on first use.

    Raises:
        ValueError: the file is no GGUF.
        ModuleNotFoundError: the package gguf is not installed.
    """
    path = Path(path)
    with path.open("rb") as file:
        if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise ValueError(f"model: expected a .gguf file or a model folder, got the file {path}")
        file.seek(0)
        if find_spec("gguf") is None:
            raise ModuleNotFoundError(
                "model: expected the package gguf, which reads .gguf files, to be installed (pip install gguf, or "
                "decantkv's extra [gguf]), got none"
            )
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = cache_folder() / f"{path.stem}-{digest[:16]}-{CONVERSION}"
    if target.is_dir():
        return target
    from filelock import FileLock

    with _one_line(f"expected a whole .gguf file, got {path}"):
        _check_size(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / ".lock"):  # of several processes one converts, the others wait for its folder
            if not target.is_dir():
                _convert(path, target)
                size = sum(file.stat().st_size for file in target.iterdir())
                note(
                    f"wrote {size / 1e6:,.0f} MB of dequantised weights to {target}, once; DECANTKV_CACHE moves the "
                    "folder"
                )
    return target


def _check_size(path: Path) -> None:
    """Raise ValueError unless a GGUF file's tensors have as many elements as the model that its header describes.

    Nothing is read but names and shapes, and the model is built without memory.
    """
    from gguf import GGUFReader

    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    tensors = {tensor.name: int(tensor.n_elements) for tensor in GGUFReader(path).tensors}
    layers = config.num_hidden_layers
    if layers > len(tensors):  # not even to be built without memory
        raise ValueError(f"model: expected a .gguf file with {layers} layers as in its header, got {path} with fewer")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    spare = ("output.weight",) if config.tie_word_embeddings else ()  # written out although it is the embeddings
    held = sum(size for name, size in tensors.items() if not name.startswith("rope_") and name not in spare)
    if (needed := sum(weight.numel() for weight in model.parameters())) != held:
        raise ValueError(
            f"model: expected a .gguf file with the {needed} weights of the {type(model).__name__} in its header, got "
            f"{path} with {held}"
        )


def _convert(path: Path, target: Path) -> None:
    for left in target.parent.glob(".converting-*"):  # by a process that was killed: the lock is held here alone
        shutil.rmtree(left, ignore_errors=True)
    scratch = target.parent / f".converting-{os.getpid()}"
    scratch.mkdir()
    try:
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        with _no_bars():
            model = _whole(path, **where, dtype=torch.float32)
        model.hf_quantizer = None  # it would refuse to save weights that are no longer quantised
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(**where).save_pretrained(scratch)
        scratch.rename(target)  # all or nothing: an interrupted conversion leaves no folder behind that looks whole
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def cache_folder() -> Path:
    """Return the folder of converted models: $DECANTKV_CACHE, or decantkv in the user's cache folder."""
    if own := os.environ.get("DECANTKV_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "decantkv"


def name_of(source: str) -> str:
    """Return a model's name for a reader: its id, or the last part of its path."""
    return Path(source).name if Path(source).exists() else source
