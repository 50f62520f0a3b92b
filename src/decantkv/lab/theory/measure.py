"""One KV head of one layer, measured: which assumptions hold there, and how far from the best the cheap choice is.

Everything comes out as flat dicts, one per row of the results file; `verify` says what each field means.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decantkv.lab.theory import bounds
from decantkv.lab.theory.cone import Cone, cone
from decantkv.lab.theory.rows import Rows, smallest
from decantkv.lab.theory.search import best_subsets
from decantkv.methods import Method
from decantkv.selection.selector import pool_scores, select

Record = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is measured in every KV head.

    Attributes:
        pool_sizes: |L| of the lowest-attention pools whose cone is solved, besides all evicted keys.
        search_size: |L| of the pools whose every k-subset is looked at.
        ks: how many keys go from those.
        search_rows: rows of each query head that are searched; the cone is solved in every row.
        n_keep: tokens that each head keeps, the window included.
        seed: of the choice of rows.
    """

    pool_sizes: tuple[int, ...]
    search_size: int
    ks: tuple[int, ...]
    search_rows: int
    n_keep: int
    seed: int


@dataclass(frozen=True)
class Head:
    """A KV head with everything that is compared on it.

    Attributes:
        rows: its g·w rows over all N keys.
        scores: [N] float32, the method's own score, as eviction uses it.
        method: pools them.
        window: w.
        pads: keys on the left that are none.
        layer, kv_head: where it is.
    """

    rows: Rows
    scores: Tensor
    method: Method
    window: int
    pads: int
    layer: int
    kv_head: int

    @property
    def group_size(self) -> int:
        """g."""
        return self.rows.num_rows // self.window

    def candidates(self) -> Tensor:
        """Keys that may go: real, and before the window."""
        return torch.arange(self.pads, self.rows.num_keys - self.window, device=self.rows.p.device)

    def where(self, row: int | None = None) -> Record:
        """The fields that say where a record is from; without a row it speaks for the whole window."""
        place: Record = {"layer": self.layer, "kv_head": self.kv_head}
        if row is None:
            return place | {"scope": "window"}
        head = self.kv_head * self.group_size + row // self.window
        return place | {"scope": "row", "head": head, "row": row % self.window}

    def pooled(self, scores: Tensor) -> Tensor:
        """[N]: scores pooled along the prompt as the method pools its own."""
        n = self.rows.num_keys
        stop = n - self.window if self.method.pool_scope == "prefix" else n
        padded = [n - self.pads] if self.pads else None
        method = self.method
        return pool_scores(
            scores[None, None], pool=method.pool, kernel_size=method.kernel_size, lengths=padded, stop=stop
        )[0, 0]


def measure(head: Head, plan: Plan) -> Iterator[Record]:
    """Every record of a KV head."""
    evicted = _evicted(head, plan)
    yield from _assumptions(head, plan, evicted["pooled"])
    yield from _ratios(head, plan, evicted["raw"])
    yield from _evictions(head, plan, evicted)


def _assumptions(head: Head, plan: Plan, evicted: Tensor) -> Iterator[Record]:
    """ε and c* of every row over growing pools."""
    candidates = head.candidates()
    sizes = [m for m in plan.pool_sizes if m <= len(candidates)]
    going = head.rows.take(evicted)
    for i in range(head.rows.num_rows):
        row = head.rows.row(i)
        order = candidates[smallest(row.p[0, candidates], max(sizes, default=0))]
        for name, pool in [*(("lowest", row.take(order[:m])) for m in sizes), ("evicted", going.row(i))]:
            found = cone(pool.residuals[0])
            k = min(max(plan.ks), pool.num_keys - 1)
            shift = pool.joint(smallest(pool.cost(), k))
            certified = bounds.certified_ratio(bounds.scan(pool, k, found), shift)
            yield {
                "kind": "assumptions",
                **head.where(i),
                "pool": name,
                "pool_size": pool.num_keys,
                "epsilon": pool.epsilon,
                "mass": float(pool.p.sum()),
                "c": found.c,
                "c_upper": found.upper,
                "k": k,
                "certified": _finite(certified),
            }


def _ratios(head: Head, plan: Plan, evicted: Tensor) -> Iterator[Record]:
    """The realised ratio over pools small enough to search: single rows first, then the window."""
    gen = torch.Generator().manual_seed(plan.seed + 1000 * head.layer + head.kv_head)
    for q in range(head.group_size):
        others = torch.randperm(head.window - 1, generator=gen)[: plan.search_rows - 1].tolist()
        for i in (head.window - 1, *others):  # the last row is what the next token's query looks like
            index = q * head.window + i
            yield from _searched(head, plan, head.rows.row(index), head.where(index), None)
    yield from _searched(head, plan, head.rows, head.where(), head.scores)


def _searched(head: Head, plan: Plan, rows: Rows, where: Record, scores: Tensor | None) -> Iterator[Record]:
    """Records of one row, by its own cost, or of the window, by the method's scores."""
    raw = rows.cost() if scores is None else scores
    pooled = head.pooled(raw.square() if scores is None else scores)
    attention = rows.p.sum(0)
    candidates = head.candidates()
    by_attention = candidates[smallest(attention[candidates], plan.search_size)]
    by_cost = candidates[smallest(raw[candidates], len(candidates))]
    cut = min(max(len(candidates) - plan.n_keep + head.window - plan.search_size // 2, 0), len(by_cost))
    pools = {"lowest": by_attention, "cut": by_cost[cut : cut + plan.search_size]}
    for name, keys in pools.items():
        pool = rows.take(keys)
        cones = [cone(residuals) for residuals in pool.residuals]
        c = min(found.c for found in cones)
        root = bounds.window_factor(pool.num_rows)
        for k, best in best_subsets(pool, plan.ks).items():
            chosen = {
                "raw": smallest(raw[keys], k),
                "pooled": smallest(pooled[keys], k),
                "attention": smallest(attention[keys], k),
            }
            yield {
                "kind": "ratio",
                **where,
                "pool": name,
                "pool_size": pool.num_keys,
                "k": k,
                "epsilon": pool.epsilon,
                "c": c,
                "c_upper": min(found.upper for found in cones),
                "bound": _finite(root * bounds.bound_factor(c, pool.epsilon, k)),
                "best": best.shift,
                **{selection: pool.joint(index) for selection, index in chosen.items()},
                "differs": set(chosen["raw"].tolist()) != set(chosen["attention"].tolist()),
                **(_relaxed(pool, k, best.shift, cones[0]) if pool.num_rows == 1 else {}),
            }


def _relaxed(pool: Rows, k: int, best: float, found: Cone) -> Record:
    """The tightest relaxed bound of a row, as a factor of the best shift."""
    tight = bounds.tightest(bounds.scan(pool, k, found), best)
    if tight is None or best == 0:
        return {"relaxed_bound": None}
    return {
        "relaxed_bound": _finite(tight.bound(best) / best),
        "relaxed_c": tight.c,
        "mu": tight.mu,
        "mu_over_best": tight.mu / best,
        "outliers": tight.outliers,
    }


def _evicted(head: Head, plan: Plan) -> dict[str, Tensor]:
    """The keys that really go at the budget, by each way of choosing."""
    mass = head.rows.p.sum(0).float()
    ways = {
        "raw": head.scores,
        "pooled": head.pooled(head.scores),
        "attention": mass,
        "attention pooled": head.pooled(mass),
    }
    gone = {}
    for name, scores in ways.items():
        kept = select(
            scores[None, None],
            n_keep=plan.n_keep,
            window=head.window,
            lengths=[head.rows.num_keys - head.pads],
        )
        kept_mask = kept.mask(head.rows.num_keys)[0, 0]
        real = torch.arange(head.rows.num_keys, device=kept_mask.device) >= head.pads
        gone[name] = torch.nonzero(real & ~kept_mask).flatten()
    return gone


def _evictions(head: Head, plan: Plan, evicted: dict[str, Tensor]) -> Iterator[Record]:
    """Return what the real eviction does to the window's outputs, whatever the theory says about it."""
    output = float(torch.linalg.vector_norm(head.rows.a))
    for selection, keys in evicted.items():
        mass = head.rows.p[:, keys].sum(-1)
        epsilon = float(head.rows.p[:, keys].max())
        yield {
            "kind": "eviction",
            **head.where(),
            "selection": selection,
            "n_keep": plan.n_keep,
            "n_evicted": len(keys),
            "epsilon": epsilon,
            "k_epsilon": len(keys) * epsilon,
            "mass_median": float(mass.median()),
            "mass_max": float(mass.max()),
            "shift": head.rows.joint(keys),
            "output": output,
        }


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def fields_of(records: Sequence[Record], kind: str) -> list[Record]:
    """The records of one kind."""
    return [record for record in records if record["kind"] == kind]
