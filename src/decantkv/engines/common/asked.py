"""The plug-in's options, read from vLLM's additional configuration or from the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from decantkv.engines.blocks import BlockSettings
from decantkv.settings import Settings

KEY = "decantkv"  # in --additional-config
VARIABLE = "DECANTKV_CONFIG"
REFUSED = "refused"  # what KEY holds once the first process has decided against eviction


@dataclass(frozen=True)
class Asked:
    """Checked options.

    Attributes:
        settings: how prompts are evicted, not yet in blocks.
        strict: whether vLLM stops if eviction is refused; otherwise it logs the reason once and serves without.
        raw: the options as given, in JSON.
    """

    settings: Settings
    strict: bool
    raw: Mapping[str, Any]

    @classmethod
    def parse(cls, raw: object) -> Asked:
        """Check the options; names that are no argument of `decantkv.attach` are the method's own.

        Raises:
            TypeError, ValueError: no mapping, an unknown option, or one out of its range.
        """
        if not isinstance(raw, Mapping):
            raise TypeError(f'decantkv: expected options such as {{"budget": 0.1}}, got {raw!r}')
        options = dict(raw)
        strict = is_strict(raw)
        options.pop("strict", None)
        if "budget" not in options:
            raise ValueError("budget: expected a fraction in (0, 1] or a whole number of tokens to keep, got none")
        if "protect" in options:
            raise ValueError("protect: expected none inside vLLM, whose prompts share no positions; use sinks")
        return cls(Settings.parse(options.pop("method", "dropkv"), **options), strict, dict(raw))

    def in_blocks(self, block_size: int) -> BlockSettings:
        """Return the settings for a pool with blocks of `block_size` tokens."""
        return BlockSettings.of(self.settings, block_size)


def is_strict(raw: object) -> bool:
    """Return whether a refusal shall stop vLLM.

    Raises:
        TypeError: neither true nor false.
    """
    strict = raw.get("strict", False) if isinstance(raw, Mapping) else False
    if not isinstance(strict, bool):
        raise TypeError(f"strict: expected true or false, got {strict!r}")
    return strict


def read(additional_config: object) -> object:
    """Return the options, unchecked: those in vLLM's configuration, else those in the environment, else None.

    Raises:
        ValueError: the environment variable holds no JSON.
    """
    own = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    if own is not None:
        return None if own == REFUSED else own
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f'{VARIABLE}: expected JSON such as {{"budget": 0.1}}, got {text!r}') from error
