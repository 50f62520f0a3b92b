"""What a sequence is about: a model, and settings for its caches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.models import CASES

METHODS: dict[str, dict[str, Any]] = {
    "dropkv": {"window": 3, "kernel_size": 3},
    "snapkv": {"window": 4, "kernel_size": 3},
    "criticalkv": {"window": 2, "kernel_size": 3},
    "caote": {},
    "andpro": {"window": 3, "kernel_size": 3, "sinks": 1},
    "andpro-chunks": {"window": 2, "sinks": 1, "chunk": 2},
    "defensivekv": {"window": 3},
    "tova": {},
    "knorm": {},
    "h2o": {},
    "streaming": {"sinks": 2},
    "sliding": {},
    "recent": {"window": 2},
    "random": {"window": 2},
}
QUERIES = ("h2o",)
RAGGED = ("ada", "ada-kvpress", "heads", "layer")


@dataclass(frozen=True)
class Setup:
    family: str
    backend: str
    method: str
    settings: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        chosen = "".join(f", {name}={value!r}" for name, value in self.settings.items())
        return f"{self.family}/{self.backend}: {self.method!r}{chosen}"


@st.composite
def settings(draw: st.DrawFn, latent: bool) -> tuple[str, dict[str, Any]]:
    """A method and options that mostly fit together; what does not is refused when a cache is made."""

    def maybe(*values: Any, default: Any = None) -> Any:
        return draw(st.sampled_from([default, default, *values]))

    method = draw(st.sampled_from(list(METHODS)))
    chosen: dict[str, Any] = {"budget": draw(st.sampled_from([0.5, 0.3, 0.7, 1.0, 8, 12])), **METHODS[method]}
    one_set = latent or method == "tova"
    free = ("shared", "pyramid") if one_set else ("shared", "pyramid", *RAGGED)
    chosen["allocation"] = draw(st.sampled_from(["uniform", *free]))
    chosen["sinks"] = maybe(0, 2)
    chosen["protect"] = maybe([(3, 5)], [(0, 1), (2, 4)], default=())
    chosen["impl"] = maybe("torch", "reference", default="auto")
    ragged = chosen["allocation"] in RAGGED
    bound = draw(st.sampled_from(["", "", "every", "capped", "both"]))
    if bound in ("every", "both") and not ragged and method not in QUERIES:
        chosen["every"] = draw(st.integers(1, 6))
        chosen["decode_budget"] = maybe(8, 10)
        chosen["protect_prompt"] = maybe(True, default=False)
    if bound in ("capped", "both") and not latent and method not in QUERIES:
        chosen["prefill_chunk"], chosen["max_kv_tokens"] = 5, draw(st.integers(8, 14))
    chosen["decode"] = draw(st.sampled_from(["auto", "own", "model"]))
    if chosen["decode"] != "own" and not ragged:
        chosen["store"] = maybe("fp8", "static", default="plain")
    chosen["reuse_lse"] = maybe(True, default=False) if chosen["impl"] != "reference" else False
    return method, {name: value for name, value in chosen.items() if value is not None}


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    family, backend = draw(st.sampled_from(CASES))
    return Setup(family, backend, *draw(settings(latent=family == "DeepseekV3")))
