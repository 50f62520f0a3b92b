"""The longest context that a model is made for."""

from __future__ import annotations

from typing import Any


def context_limit(config: Any) -> int | None:
    """Return the most tokens of prompt and answer that a configuration allows, or None if it sets no limit.

    YaRN's and linear scaling's factors count whether or not `max_position_embeddings` includes them already. Dynamic
    scaling follows the text, so it has no limit.
    """
    text = config.get_text_config(decoder=True)
    own = getattr(text, "max_position_embeddings", None)
    if not isinstance(own, int) or own < 1:
        return None
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    rope = rope.get("full_attention", rope)  # one mapping per type of layer, or one for all
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "dynamic":
        return None
    if kind not in ("yarn", "linear"):
        return own
    before = rope.get("original_max_position_embeddings") or own
    return max(own, int(before * float(rope.get("factor") or 1.0)))


def check_context(config: Any, tokens: int, argument: str, *, beyond: bool, way_out: str = "") -> None:
    """Raise ValueError if prompt and answer are longer than the model's context, unless `beyond`.

    Args:
        tokens: of the prompt and the answer, as far as the model reads it.
        argument: name of the option for the message.
        way_out: what the user can do instead, for the message.
    """
    limit = context_limit(config)
    if limit is None or tokens <= limit or beyond:
        return
    raise ValueError(
        f"{argument}: expected at most the model's {limit:,} tokens for prompt and answer, got {tokens:,}; "
        f"--beyond-context reads them nevertheless{way_out}"
    )
