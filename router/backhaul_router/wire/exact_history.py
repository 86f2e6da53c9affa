"""Token splicing, for histories kept as tokens: the prompt of the next turn continues the very tokens that the engine ran, in
place of the same text, tokenised anew.

A client sends an assistant's answer back as text. Its tokens often are others than those that the model made: a text can be
spelled in several ways, reasoning is left out, a tool call's arguments are written by another JSON library. From there on
nothing on the decode engine can be reused, and the model reads something that it did not write. `splice` puts the model's own
tokens back, where it is certain which part of the prompt they stand for.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

_OWN_ENDS = frozenset({"stop", "tool_calls", "function_call"})
_TAIL = 16
"""Tokens of the template that may follow the one which ends an answer."""


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    id: str | None = None
    index: int | None = None
    function: _Function | None = None


class _Part(msgspec.Struct):
    type: str | None = None
    text: str | None = None


class _Message(msgspec.Struct):
    role: str | None = None
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    function_call: msgspec.Raw = msgspec.Raw(b"null")
    refusal: str | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Message | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


class _Whole(msgspec.Struct):
    message: msgspec.Raw = msgspec.Raw(b"null")
    finish_reason: str | None = None
    stop_reason: int | str | None = None


_read_choices = msgspec.json.Decoder(list[_Whole]).decode
_read_message = msgspec.json.Decoder(_Message).decode
_read_chunk = msgspec.json.Decoder(_Chunk).decode


class AnswerContent(msgspec.Struct, frozen=True):
    """Normal form of an assistant's message: what it says, however it is written."""

    text: str
    calls: tuple[tuple[str, Any], ...]
    """Of each tool call the function's name and its arguments, as JSON in one spelling where they are valid JSON."""
    reasoning: str = ""

    def repeats(self, answer: AnswerContent) -> bool:
        """Whether this is that answer come back, with its reasoning or without."""
        return (self.text, self.calls) == (answer.text, answer.calls) and self.reasoning in ("", answer.reasoning)


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """Tokens of a whole history: what a turn leaves for the next one to continue."""

    ran: array[int]
    """All ids that the engine ran and made; the last one ended the answer."""
    said: AnswerContent
    """What the answer says."""
    rendering: bytes
    """A digest of what else than its messages the prompt was rendered with (`wire.rendering`)."""

    @classmethod
    def of(cls, prompt: Iterable[int], made: Iterable[int], said: AnswerContent, rendering: bytes) -> TokenHistory:
        return cls(array("I", (*prompt, *made)), said, rendering)


def content_of(message: bytes) -> AnswerContent | None:
    """What a message in JSON says; `None` when it is not an assistant's, or holds what is not compared here."""
    try:
        read = _read_message(message)
    except (msgspec.DecodeError, RecursionError):
        return None
    if read.role != "assistant" or read.name or read.refusal or bytes(read.function_call) != b"null":
        return None
    text = _text(read.content)
    if text is None:
        return None
    return AnswerContent(text.strip(), tuple(_call(call) for call in read.tool_calls or ()), _reasoning(read).strip())


def content_of_answer(answer: Mapping[str, msgspec.Raw], stops: Collection[int] = ()) -> AnswerContent | None:
    """What an answer's only choice says; `None` where something else than its own end ended it."""
    try:
        (choice,) = _read_choices(answer.get("choices", msgspec.Raw(b"[]")))
    except (msgspec.DecodeError, ValueError):
        return None
    return content_of(bytes(choice.message)) if _has_ended(choice, stops) else None


def _has_ended(choice: _Choice | _Whole, stops: Collection[int]) -> bool:
    """Not cut off by a limit, a stop string or a stop token of the client's: the last token is the model's own end."""
    return (
        choice.finish_reason in _OWN_ENDS
        and not isinstance(choice.stop_reason, str)
        and choice.stop_reason not in stops
    )


class AnswerAccumulator:
    """Accumulator of a stream's deltas: puts an answer together from its events."""

    def __init__(self, stops: Collection[int] = ()) -> None:
        self._stops = stops
        self._ended = False
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[list[str], list[str]]] = {}
        self._understood = True

    def feed(self, data: bytes) -> None:
        """One event's JSON."""
        try:
            chunk = _read_chunk(data)
        except msgspec.DecodeError:
            self._understood = False
            return
        for choice in chunk.choices:
            self._ended = self._ended or _has_ended(choice, self._stops)
            if choice.delta is None:
                continue
            text = _text(choice.delta.content)
            if text is None or choice.delta.refusal or bytes(choice.delta.function_call) != b"null":
                self._understood = False
                return
            self._texts.append(text)
            self._reasoning.append(_reasoning(choice.delta))
            for call in choice.delta.tool_calls or ():
                names, arguments = self._calls.setdefault(call.index or 0, ([], []))
                if call.function is not None:
                    names.append(call.function.name or "")
                    arguments.append(call.function.arguments or "")

    @property
    def said(self) -> AnswerContent | None:
        """All of it; `None` when some of it could not be read."""
        if not self._understood or not self._ended:
            return None
        calls = (self._calls[index] for index in sorted(self._calls))
        return AnswerContent(
            "".join(self._texts).strip(),
            tuple(("".join(names), _value("".join(arguments))) for names, arguments in calls),
            "".join(self._reasoning).strip(),
        )


def splice(ran: Sequence[int], rendered: Sequence[int], closed: Sequence[int]) -> tuple[int, ...] | None:
    """The prompt of `rendered`, with `ran` in place of the history up to the last answer; `None` where that cannot be told.

    `ran` is what the engine ran and made: the last prompt, and the answer with the token that ended it. `closed` is the
    history up to and including that answer, rendered without a generation prompt; `rendered` goes on from there.
    """
    if not ran or tuple(rendered[: len(closed)]) != tuple(closed):
        return None
    end = ran[-1]
    for at in range(len(closed) - 1, max(len(closed) - 1 - _TAIL, -1), -1):
        if closed[at] == end:
            return (*ran, *rendered[at + 1 :])
    return None


def _reasoning(message: _Message) -> str:
    return message.reasoning or message.reasoning_content or ""


def _text(content: str | list[_Part] | None) -> str | None:
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.type != "text" or part.text is None for part in content):
        return None
    return "".join(part.text or "" for part in content)


def _call(call: _Call) -> tuple[str, Any]:
    function = call.function or _Function()
    return function.name or "", _value(function.arguments or "")


def _value(arguments: str) -> Any:
    try:
        return msgspec.json.encode(msgspec.json.decode(arguments or "{}"), order="sorted")
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError):
        return arguments
