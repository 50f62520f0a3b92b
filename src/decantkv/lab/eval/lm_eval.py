"""lm-eval's tasks with eviction on: a model class for EleutherAI/lm-evaluation-harness.

`decantkv eval lm --model … --tasks …` runs it; from Python:

```python
import lm_eval
from decantkv.lab.eval.lm_eval import DecantLM
lm_eval.simple_evaluate(model=DecantLM(pretrained="…", method="dropkv", budget=0.05), tasks=["niah_single_1"])
```

Question-aware by construction: the harness hands over one prompt, question included. Answers are generated; tasks that
only compare likelihoods read the prompt in one forward, in which nothing is evicted, and are refused.
"""

from __future__ import annotations

from typing import Any, NoReturn

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from decantkv.attachment import attach
from decantkv.methods import Method
from decantkv.selection.allocation import AllocationRule
from decantkv.selection.budget import Budget
from decantkv.settings import Settings


@register_model("decantkv")
class DecantLM(HFLM):  # type: ignore[misc]  # lm_eval ships no types
    """A Hugging Face model whose `generate` keeps a fraction of each prompt's cache.

    Args:
        pretrained: a model id, or a loaded model with `tokenizer=`.
        method, budget, allocation, sinks: as in `decantkv.attach`; `method="full"` leaves the model alone.
        kwargs: HFLM's own. batch_size is 1, since the harness pads otherwise.
    """

    def __init__(
        self,
        pretrained: Any = None,
        *,
        method: str | Method = "dropkv",
        budget: float | int | str | Budget = 0.1,
        allocation: str | AllocationRule | None = None,
        sinks: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.settings = (
            None if method == "full" else Settings.parse(method, budget=budget, allocation=allocation, sinks=sinks)  # type: ignore[arg-type]
        )
        self.reports: list[Any] = []
        kwargs.setdefault("batch_size", 1)
        super().__init__(pretrained=pretrained, **kwargs)

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **generation_kwargs: Any) -> Any:
        """One `generate` with eviction on."""
        if self.settings is None:
            return super()._model_generate(context, max_length, stop, **generation_kwargs)
        chosen = self.settings
        with attach(
            self.model,
            chosen.method,
            budget=chosen.budget,
            allocation=chosen.allocation,
            sinks=chosen.sinks,
        ) as run:
            out = super()._model_generate(context, max_length, stop, **generation_kwargs)
        self.reports.append(run.report())
        return out

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> NoReturn:
        """Refused: one forward over prompt and answer evicts nothing before the answer is read."""
        raise ValueError(
            "tasks: expected tasks that generate (generate_until), got one that compares likelihoods, "
            "which eviction cannot touch; use `decantkv eval --likelihood`"
        )

    loglikelihood_rolling = loglikelihood
