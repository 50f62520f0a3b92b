"""Words for keys, values and lists: wonderwords' lists, as RULER uses them."""

from __future__ import annotations

import random
import uuid
from functools import cache
from importlib import resources
from importlib.util import find_spec

_DIGITS = 7


@cache
def nouns() -> tuple[str, ...]:
    """wonderwords' nouns."""
    return _words("nounlist.txt")


@cache
def adjectives() -> tuple[str, ...]:
    """wonderwords' adjectives."""
    return _words("adjectivelist.txt")


def pair(rng: random.Random) -> str:
    """An adjective-noun pair: a key of the needle tasks. RULER draws from the list of all, nine million long."""
    return f"{rng.choice(adjectives())}-{rng.choice(nouns())}"


@cache
def plain_words() -> tuple[str, ...]:
    """Nouns, adjectives and verbs in RULER's order (sorted, then shuffled by seed 42): the words of cwe."""
    words = sorted({*nouns(), *adjectives(), *_words("verblist.txt")})
    random.Random(42).shuffle(words)
    return tuple(words)


def draw(kind: str, rng: random.Random) -> str:
    """A random key or value: "words" (adjective-noun), "numbers" (7 digits) or "uuids" (version 4)."""
    if kind == "words":
        return pair(rng)
    if kind == "numbers":
        return str(rng.randint(10 ** (_DIGITS - 1), 10**_DIGITS - 1))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _words(name: str) -> tuple[str, ...]:
    if find_spec("wonderwords") is None:
        raise ModuleNotFoundError("RULER's word lists need the package wonderwords: pip install 'decantkv[eval]'")
    text = (resources.files("wonderwords") / "assets" / name).read_text(encoding="utf-8")
    return tuple(line.strip() for line in text.splitlines() if line.strip())
