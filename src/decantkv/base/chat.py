"""Chats as prompts. A chat template is taken apart by rendering a chat with and without a part, or around a marker."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from decantkv.base.options import Span, expect_choice

USER_TEXT = "\u241e\u241fthe user's text\u241f\u241e"  # stands for it while a chat template is taken apart
ROLES = ("system", "tools")


def chat_prompt(tokenizer: Any, text: str, *, system: str | None = None) -> tuple[str, bool]:
    """Return the text as one user message in the model's chat template, and whether there is a template.

    The template writes special tokens itself: tokenize with `add_special_tokens=False` if there is one.

    Args:
        system: text of a system message in front; None for what the template itself adds.
    """
    if not getattr(tokenizer, "chat_template", None):
        return text, False
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": text})
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), True


def chat_frame(tokenizer: Any, *, system: str | None = None) -> tuple[str, str] | None:
    """Return what the chat template puts before and after a user's text, or None without a template.

    Raises:
        ValueError: the template does not repeat the user's text once.
    """
    rendered, templated = chat_prompt(tokenizer, USER_TEXT, system=system)
    if not templated:
        return None
    before, mark, after = rendered.partition(USER_TEXT)
    if not mark or USER_TEXT in after:
        raise ValueError("tokenizer: expected a chat template that repeats the user's text once")
    return before, after


class ProtectedChat(NamedTuple):
    """A chat's token ids, and the spans of them that are always kept."""

    ids: tuple[int, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True, eq=False)
class Chat:
    """A chat that is read as a prompt, so that `protect` can name its parts.

    Attributes:
        tokenizer: a transformers tokenizer with a chat template.
        messages: as `tokenizer.apply_chat_template` takes them.
        tools: as `tokenizer.apply_chat_template` takes them; None: no tools.
        generation: whether the prompt ends with the beginning of the model's answer.
        options: further arguments of `apply_chat_template`, such as `enable_thinking`.
    """

    tokenizer: Any
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    generation: bool = True
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def text(self) -> str:
        """The prompt as text, special tokens included."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                f"chat: expected a tokenizer with a chat template, got a {type(self.tokenizer).__name__} without one"
            )
        messages, tools = [dict(message) for message in self.messages], list(self.tools or ()) or None
        try:
            rendered: str = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=self.generation, **self.options
            )
        except ImportError:
            raise
        except Exception as error:  # templates raise errors of their own, through jinja2
            raise ValueError(f"chat: expected messages that the chat template takes, got an error: {error}") from error
        return rendered

    @functools.cached_property
    def ids(self) -> tuple[int, ...]:
        """The prompt's token ids."""
        return tuple(self.tokenizer(self.text, add_special_tokens=False)["input_ids"])

    def spans(self, role: str) -> tuple[Span, ...]:
        """Return the spans of `ids` that are there because of the system messages, or of the tools.

        Args:
            role: "system" or "tools".

        Raises:
            ValueError: the chat has no such part, or the template renders the chat with or without it alone.
        """
        expect_choice("protect", role, ROLES)
        if role == "tools":
            there, less = bool(self.tools), dataclasses.replace(self, tools=None)
        else:
            others = [message for message in self.messages if message["role"] != "system"]
            there, less = len(others) < len(self.messages), dataclasses.replace(self, messages=others)
        part = "tools" if role == "tools" else "a system message"
        if not there:
            raise ValueError(f"protect: expected a chat with {part} beside {role!r}, got one without")
        with_it = self.ids
        try:
            without = less.ids
        except ValueError as error:
            raise ValueError(f"protect: expected a chat template that also renders without {part}: {error}") from error
        found = added_spans(with_it, without)
        if not found:
            raise ValueError(f"protect: expected a chat template that writes {part}, got one that leaves it out")
        return found

    def protected(self, roles: Sequence[str]) -> ProtectedChat:
        """Return the chat's ids with the spans of these parts."""
        return ProtectedChat(self.ids, tuple(sorted({span for role in roles for span in self.spans(role)})))


def added_spans(longer: Sequence[int], shorter: Sequence[int]) -> tuple[Span, ...]:
    """Return the spans of `longer` that `shorter` does not have, in ascending order.

    A span that could begin earlier, since the token before it is also its last one, begins as early as it can: a turn
    then holds the token that opens it, and not the one that opens the next.
    """
    most = min(len(longer), len(shorter))
    start = next((i for i in range(most) if longer[i] != shorter[i]), most)
    same = next((i for i in range(most - start) if longer[-1 - i] != shorter[-1 - i]), most - start)
    inner, outer = shorter[start : len(shorter) - same], longer[start : len(longer) - same]
    spans: list[Span] = []
    for kind, _, _, first, last in difflib.SequenceMatcher(None, inner, outer).get_opcodes():
        if kind == "equal" or first == last:
            continue
        first, last, least = first + start, last + start, spans[-1][1] if spans else 0
        while kind == "insert" and first > least and longer[first - 1] == longer[last - 1]:
            first, last = first - 1, last - 1
        spans.append((first, last))
    return tuple(spans)


def protected_chats(roles: Sequence[str], chat: Chat | Sequence[Chat] | None) -> tuple[ProtectedChat, ...]:
    """Return the chats with the spans of the roles; none where no role is to be protected.

    Raises:
        TypeError: something that is no `Chat`.
        ValueError: roles without a chat, or a chat without roles; see also `Chat.spans`.
    """
    if not roles and chat is None:
        return ()
    if chat is None or (isinstance(chat, Sequence) and not chat):
        raise ValueError(
            f"chat: expected the prompt as a decantkv.Chat beside protect={roles[0]!r}, whose place depends on the "
            "chat template, got none"
        )
    if not roles:
        raise ValueError("protect: expected 'system' or 'tools' beside chat, got neither")
    chats = chat if isinstance(chat, Sequence) else [chat]
    for one in chats:
        if not isinstance(one, Chat):
            raise TypeError(f"chat: expected a decantkv.Chat or a list of them, got {type(one).__name__}")
    return tuple(one.protected(roles) for one in chats)


def chat_of(row: Sequence[int], chats: Sequence[ProtectedChat]) -> ProtectedChat:
    """Return the longest chat that a prompt's token ids begin with.

    Raises:
        ValueError: the prompt is another one.
    """
    fitting = [chat for chat in chats if tuple(row[: len(chat.ids)]) == chat.ids]
    if not fitting:
        agree = max(next((i for i, x in enumerate(chat.ids) if row[i : i + 1] != [x]), 0) for chat in chats)
        raise ValueError(
            "chat: expected a prompt that begins with a chat given to decantkv, as the chat template writes it, got "
            f"one of {len(row)} tokens that differs from each after {agree}"
        )
    return max(fitting, key=lambda chat: len(chat.ids))
