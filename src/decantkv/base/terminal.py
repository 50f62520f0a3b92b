"""Text on the terminal. Control characters in prompts, answers and file names are shown, never executed."""

from __future__ import annotations

import sys

_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))  # they reorder what a line shows
_VISIBLE = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},  # ␀ to ␟
    0x7F: "␡",
    **dict.fromkeys((*range(0x80, 0xA0), *_BIDI, *range(0xD800, 0xE000)), "�"),
}


def visible(text: str) -> str:
    """Return the text with a visible sign in place of each control character except line ends and tabs."""
    return text.translate(_VISIBLE)


def write(text: str, *, end: str = "\n") -> None:
    """Write text to standard output: through `visible` to a terminal, unchanged to a file or a pipe."""
    sys.stdout.write((visible(text) if sys.stdout.isatty() else text) + end)
    sys.stdout.flush()


def note(text: str) -> None:
    """Write a line of text to standard error, above a spinner if one is shown."""
    sys.stderr.write(visible(text) + "\n")
