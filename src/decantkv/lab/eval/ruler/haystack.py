"""Essay text to hide needles in: any plain text, from a file or a folder, or RULER's own essays from a hub."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from decantkv.lab.eval.hub import load_rows

HUB_ESSAYS = "baber/paul_graham_essays"

_GUTENBERG = re.compile(r"\*\*\*\s*(START|END) OF (?:THIS|THE) PROJECT GUTENBERG[^\n]*\n?")
_END_OF_SENTENCE = re.compile(r"""[.!?]["'”’)\]]*$""")
_NO_END = re.compile(r"""^["'“‘(\[]*(?:Mr|Mrs|Ms|Dr|St|Prof|Capt|Col|Gen|Lt|Rev|Jr|Sr|vs|etc|i\.e|e\.g|[A-Z])\.$""")


@dataclass(frozen=True)
class Haystack:
    """Essay text as whitespace-split words.

    Attributes:
        name: where the text is from, for the rows of results.
        words: the text; repeated when a prompt needs more.
        openings: places, evenly spread over the text, at which prompts begin in turn; 1: all begin at its start.
    """

    name: str
    words: tuple[str, ...]
    openings: int = 1

    @cached_property
    def sha256(self) -> str:
        """Of the words joined by single spaces."""
        return hashlib.sha256(" ".join(self.words).encode()).hexdigest()

    @cached_property
    def _ends(self) -> tuple[bool, ...]:
        """Whether a sentence ends with each word: RULER asks nltk, whose models must be downloaded; a rule does."""
        following = (*self.words[1:], "A")
        return tuple(
            bool(_END_OF_SENTENCE.search(word)) and not _NO_END.match(word) and not after[0].islower()
            for word, after in zip(self.words, following, strict=True)
        )

    def describe(self) -> dict[str, str]:
        """Name, hash and, where there are several, the number of openings, for the rows of results."""
        varied = {"openings": str(self.openings)} if self.openings > 1 else {}
        return {"haystack": self.name, "sha256": self.sha256, **varied}

    def opening(self, index: int) -> int:
        """The word at which prompt number `index` begins: the first of a sentence."""
        word = len(self.words) * (index % self.openings) // self.openings
        while word > 0 and not self._ends[word - 1]:
            word -= 1
        return word

    def sentences(self, count: int, index: int = 0) -> list[str]:
        """`count` words from the opening of prompt `index` on, as sentences, which joined by spaces give the text."""
        sentences, begin, start = [], 0, self.opening(index)
        places = [(start + i) % len(self.words) for i in range(count)]
        words = [self.words[place] for place in places]
        for i, place in enumerate(places):
            if self._ends[place] or i == count - 1:
                sentences.append(" ".join(words[begin : i + 1]))
                begin = i + 1
        return sentences


def load_haystack(source: str | Path, openings: int = 1) -> Haystack:
    """Read a text file, a folder of .txt files, or a JSON file with a "text" entry (RULER's PaulGrahamEssays.json).

    Project Gutenberg's licence text around a book is left out.

    Raises:
        ValueError: nothing to read there, or too little text to hide anything in.
    """
    path = Path(source)
    if path.is_dir():
        files = sorted(path.glob("*.txt"))
    elif path.is_file():
        files = [path]
    else:
        raise ValueError(f"haystack: expected a text file or a folder of .txt files, got {str(source)!r}")
    words = [word for file in files for word in _read(file).split()]
    if len(words) < 100:
        raise ValueError(f"haystack: expected at least 100 words of text in {str(source)!r}, got {len(words)}")
    return Haystack(path.name, tuple(words), openings)


def hub_haystack(openings: int = 1) -> Haystack:
    """RULER's essays from the Hugging Face hub.

    Raises:
        ValueError: the package datasets is missing, or the hub is out of reach.
    """
    way_out = "give text of your own with --haystack FILE_OR_FOLDER"
    rows = load_rows("haystack", HUB_ESSAYS, None, split="train", way_out=way_out)
    return Haystack(HUB_ESSAYS, tuple(" ".join(rows["text"]).split()), openings)


def _read(file: Path) -> str:
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix == ".json":
        try:
            return str(json.loads(text)["text"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f'haystack: expected JSON with a "text" entry in {str(file)!r}, got {error}') from error
    marks = {mark.group(1): mark for mark in _GUTENBERG.finditer(text)}
    begin = marks["START"].end() if "START" in marks else 0
    return text[begin : marks["END"].start() if "END" in marks else len(text)]
