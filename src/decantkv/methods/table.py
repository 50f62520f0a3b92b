"""The table of methods that `decantkv methods` prints."""

from __future__ import annotations

from dataclasses import dataclass, fields

from decantkv.methods import known_methods
from decantkv.methods.base import Method


@dataclass(frozen=True)
class Row:
    """One method under its default settings; every field is text for a reader.

    Attributes:
        cost: multiply-adds per cached token and KV head.
        needs: what it looks at beyond the window's queries, keys and values.
    """

    name: str
    kind: str
    score: str
    keeps: str
    pooling: str
    allocation: str
    defaults: str
    presets: str
    cost: str
    needs: str
    source: str


def table() -> list[Row]:
    """Return one row per registered method, in the registry's order."""
    return [_row(cls()) for cls in known_methods().values()]


def _row(method: Method) -> Row:
    own = [f.name for f in fields(method) if f.name not in ("pool", "kernel_size", "pool_scope")]
    pooling = "–" if method.pool == "none" else f"{method.pool} {method.kernel_size}, {method.pool_scope}"
    return Row(
        name=method.name,
        kind=method.kind,
        score=method.formula,
        keeps=method.keeps,
        pooling=pooling,
        allocation="shared" if method.shared_by_heads else method.allocation,
        defaults=", ".join(f"{name} {getattr(method, name)}" for name in own),
        presets=", ".join(type(method).presets),
        cost=method.cost,
        needs=", ".join(sorted(method.needs)) or "–",
        source=method.source,
    )
