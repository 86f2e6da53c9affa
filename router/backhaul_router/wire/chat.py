"""Strategy of `/v1/chat/completions`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar, Final

import msgspec
from msgspec import Raw

from .endpoint import BOOL, INT, NO_IDS, OBJECT, TEXT, Api, History, Types
from .json_members import NULL, Members, decode_any, decode_list, decode_members, encode
from .stream import Listeners, StreamFilter
from .usage import Usage

OPENAI_TYPES: Final[Types] = {
    "model": TEXT,
    "stream": BOOL,
    "stream_options": OBJECT,
    "n": INT,
    "best_of": INT,
    "use_beam_search": BOOL,
    "cache_salt": TEXT,
    "echo": BOOL,
    "return_token_ids": BOOL,
    "max_tokens": INT,
    "max_completion_tokens": INT,
}


class _Message(msgspec.Struct):
    content: Raw | msgspec.UnsetType = msgspec.UNSET


class _Part(msgspec.Struct):
    type: str
    uuid: None = None
    """Beside one, as where there is no `type`, the engine goes by which other keys there are (vLLM's chat_utils.py)."""


class Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: Raw = NULL


_decode_message = msgspec.json.Decoder(_Message).decode
_decode_parts = msgspec.json.Decoder(list[str | _Part]).decode
_decode_choices = msgspec.json.Decoder(list[Choice]).decode
_decode_usage = msgspec.json.Decoder(Usage).decode
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})


def read_choices(members: Members) -> list[Choice]:
    """Raises `msgspec.DecodeError`."""
    return _decode_choices(members.get("choices", Raw(b"[]")))


class Chat(Api):
    """Strategy of chat: messages in, choices out."""

    types: ClassVar[Types] = OPENAI_TYPES
    limit = "max_tokens"
    positive = ("max_tokens", "max_completion_tokens", "n")
    # The prompt would not be what was compared (truncation depends on each leg's token limit, embeddings replace it), or the
    # answer describes the prompt, which D would not have computed.
    alone = frozenset(
        {"echo", "prompt_logprobs", "truncate_prompt_tokens", "truncation_side", "suffix", "prompt_embeds"}
        | {"return_prompt_text", "return_token_offsets", "routed_experts_prompt_start", "mm_payload"}
        | {"return_mm_kwargs"}
    )
    # A stop string that the first token completes would abort the request, and with it P's handle.
    not_for_prefill = frozenset(
        {"stream", "stream_options", "stream_interval", "max_tokens", "max_completion_tokens", "min_tokens"}
        | {"n", "best_of", "stop", "include_stop_str_in_output", "logprobs", "top_logprobs"}
        | {"logprob_token_ids", "return_token_ids", "return_tokens_as_token_ids", "request_id"}
    )
    asks_for_ids = "return_token_ids"
    reports_usage = False
    exact_histories = True
    tokenized = frozenset(
        {"model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens"}
        | {"chat_template", "chat_template_kwargs"}
    )
    tokenized_of_message: ClassVar[frozenset[str] | None] = frozenset(
        {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning"}
    )

    def history(self, members: Members) -> History:
        try:
            messages = tuple(map(bytes, decode_list(members.get("messages", Raw(b"")))))
            # Content that is no text is a list; most messages hold none.
            contents = [_decode_message(message) for message in messages if b"[" in message]
        except (msgspec.DecodeError, RecursionError):
            return History(odd="messages")
        if {message[:1] for message in messages} != {b"{"}:
            return History(odd="messages")
        return History(messages, messages, unproven=_media(contents))

    def for_usage(self, members: Members) -> Members:
        try:
            options = decode_any(members.get("stream_options", NULL))
            if not isinstance(options, dict | None):
                return {}
            options = {**(options or {}), "include_usage": True, "continuous_usage_stats": False}
            return {"stream_options": Raw(encode(options))}
        except RecursionError:  # the engine is to say what it thinks of it
            return {}

    def read_usage(self, raw: Raw) -> Usage:
        return _decode_usage(raw)

    def read_ids(self, members: Members) -> tuple[tuple[int, ...] | None, Raw]:
        """Of the only choice. Chat has the prompt's at the top, completions per choice."""
        choices = read_choices(members)
        if len(choices) != 1:
            return NO_IDS
        (choice,) = choices
        ran = choice.prompt_token_ids
        return choice.token_ids, members.get("prompt_token_ids", NULL) if bytes(ran) == b"null" else ran

    def hide_ids(self, members: Members) -> None:
        if "prompt_token_ids" in members:
            members["prompt_token_ids"] = NULL
        if "choices" in members and _SHOWS_IDS.search(members["choices"]):
            members["choices"] = Raw(encode([_without_ids(choice) for choice in decode_list(members["choices"])]))

    def stream_filter(self, listeners: Listeners) -> StreamFilter:
        return StreamFilter(listeners)


_SHOWS_IDS: Final = re.compile(rb'token_ids"\s*:\s*[^\sn]')
"""Of choices some have ids. A quote inside a text is escaped, so that a text does not match."""


def _without_ids(choice: Raw) -> Members:
    members = decode_members(choice)
    return {key: NULL if key in ("token_ids", "prompt_token_ids") else value for key, value in members.items()}


def _media(contents: Iterable[_Message]) -> str | None:
    for message in contents:
        content = message.content
        if content is msgspec.UNSET or not bytes(content).startswith(b"["):
            continue
        try:
            parts = _decode_parts(content)
        except msgspec.DecodeError:
            return "content"
        for part in parts:
            if not isinstance(part, str) and part.type not in _TEXT_PARTS:
                return part.type
    return None
