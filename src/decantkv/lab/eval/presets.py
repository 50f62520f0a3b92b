"""Ready-made plans: the paper's table, this repository's own, and the small ones anyone can rerun."""

from __future__ import annotations

from dataclasses import dataclass

SIX = "dropkv,snapkv,snapkv:shared,random,recent,quantised-4bit"
ALL = (
    "dropkv,dropkv[pool=avg],dropkv[window=32],dropkv[pool=avg,window=32],dropkv[reduce=max],"
    "dropkv[window=32,reduce=max],adadropkv,snapkv,snapkv:shared,snapkv[window=32,allocation=ada],"
    "criticalkv,criticalkv[allocation=ada],andpro,defensivekv,h2o,knorm,streaming,recent,random,"
    "quantised-8bit,quantised-4bit,quantised-2bit"
)

TOGETHER = (  # what helps one by one in `table`, in one method: head budgets, a wider window, an average
    "adadropkv[window=32],adadropkv[pool=avg,window=32],adadropkv[pool=avg,window=16],"
    "snapkv:shared[pool=avg,window=32,allocation=ada]"
)

RIVALS = "expected-attention,pyramidkv,tova,caote"  # those that `table` leaves out

WINDOWS = (  # how few of the last queries are enough
    "dropkv,dropkv[window=1],dropkv[window=2],dropkv[window=4],dropkv[window=1,allocation=shared],"
    "adadropkv,adadropkv[window=1],adadropkv[window=2],adadropkv[pool=avg,window=1],adadropkv[pool=avg,window=32],"
    "snapkv:shared,snapkv:shared[window=1],snapkv:shared[window=1,allocation=ada],tova,"
    "criticalkv[window=1,pool=max,kernel_size=11,allocation=ada]"
)

VARIANTS = (  # what might do better than DropKV as it stands, one change at a time and then together
    "dropkv,dropkv[pool=avg],dropkv[pool=none],dropkv[window=4],dropkv[window=16],dropkv[window=32],dropkv[reduce=max],"
    "dropkv[weigh=output],dropkv[kernel_size=5],dropkv[kernel_size=21],adadropkv,adadropkv[window=32],"
    "adadropkv[weigh=output],adadropkv[pool=none],snapkv,snapkv:shared,snapkv:shared[pool=none],"
    "snapkv:shared[kernel_size=5],snapkv:shared[allocation=ada],criticalkv,random"
)


@dataclass(frozen=True)
class Preset:
    """Options of `decantkv eval` that a preset fills in where they were not given.

    Attributes:
        models: the models it was made for; none is loaded by itself, `--model` names one.
        likelihood: also the references' likelihood; answers: generate and score answers.
    """

    suite: str
    length: str
    method: str
    budget: str
    regime: str
    samples: int
    models: tuple[str, ...] = ()
    likelihood: bool = False
    answers: bool = True


PRESETS: dict[str, Preset] = {
    "paper": Preset(
        suite="ruler",
        length="4096,8192,16384,32768,65536,131072",
        method="dropkv,adadropkv,snapkv:shared,snapkv,criticalkv,andpro,streaming,h2o",
        budget="0.05,0.1,0.3",
        regime="aware",
        samples=500,
        models=(
            "meta-llama/Llama-3.1-8B-Instruct",
            "aws-prototyping/MegaBeam-Mistral-7B-512k",
            "Qwen/Qwen2.5-7B-Instruct-1M",
        ),
    ),
    "first": Preset("ruler", "4096,16384", SIX, "0.05", "aware,agnostic", 50),
    "table": Preset("ruler", "4096,8192,16384,32768", ALL, "0.05,0.1,0.3", "aware,agnostic", 50),
    "together": Preset("ruler", "4096,8192,16384,32768", TOGETHER, "0.05,0.1,0.3", "aware,agnostic", 50),
    "rivals": Preset("ruler", "4096,8192,16384,32768", RIVALS, "0.05,0.1,0.3", "aware,agnostic", 50),
    "windows": Preset("ruler", "4096,8192,16384,32768", WINDOWS, "0.05,0.1,0.3", "aware,agnostic", 50),
    "fidelity": Preset(
        "fidelity",
        "512",
        "dropkv,adadropkv,snapkv:shared,snapkv,knorm,streaming,recent,random,quantised-4bit,quantised-2bit",
        "0.05,0.1,0.3",
        "aware,agnostic",
        16,
    ),
    "search": Preset("niah", "512", VARIANTS, "0.05,0.1", "aware", 40, likelihood=True, answers=False),
    "regression": Preset(
        "niah", "256", "dropkv,snapkv:shared,random", "0.1", "aware", 40, likelihood=True, answers=False
    ),
}
