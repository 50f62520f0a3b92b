"""What a run was made of, so that its rows never mix with those of other weights or other data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import try_to_load_from_cache


def of_files(files: Iterable[Path]) -> str:
    """The sha256 of the files' bytes, one after another."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as handle:
            hashlib.file_digest(handle, lambda: digest)
    return digest.hexdigest()


def of_model(source: str) -> str:
    """A file's sha256, a folder's over its weight files, the commit of a model that was loaded from the hub.

    Raises:
        ValueError: a folder without weight files, or a model that was not loaded.
    """
    path = Path(source)
    if path.is_file():
        return of_files([path])
    if not path.is_dir():
        return of_hub(source, "config.json")
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin"))  # in the order that transformers looks
    if not files:
        raise ValueError(f"model: expected *.safetensors or *.bin in {source}, got neither")
    return of_files(files)


def of_hub(repo: str, file: str, kind: str = "model") -> str:
    """The commit at which a repository's file lies in the hub's cache; `kind` is "model" or "dataset".

    Raises:
        ValueError: it does not lie there.
    """
    found = try_to_load_from_cache(repo, file, repo_type=kind)
    if not isinstance(found, str):
        raise ValueError(f"{kind}: expected {repo}'s {file} in the hub's cache, which names its commit, got none")
    return Path(found).parents[file.count("/")].name
