"""A rich console for text of unknown origin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import console as rich
from rich.segment import Segment
from rich.text import Text

from decantkv.base.terminal import visible


class Console(rich.Console):
    """A rich console on which only rich's own styles make escape sequences."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Measure and lay out the text as it will be shown."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: Any, options: rich.ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of the renderable, their text made visible; rich's own control segments pass."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)
