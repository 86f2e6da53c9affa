"""Parser of client requests: what the router needs to know of them, read once. Registry of the endpoints whose turns it runs.

Bodies are split into their top-level members and put together again (`json_members`); ours is written last. What is particular
to an endpoint is in its `Api`; a new one is a subclass and a line in `_APIS`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from .chat import Chat
from .completions import Completions
from .endpoint import Api
from .exact_history import AnswerAccumulator
from .json_members import Members, interned, is_set, read_members, value_of
from .messages import Messages
from .responses import Responses
from .stream import AccountCallback, Listeners, StreamFilter, UsageCallback


class Endpoint(enum.StrEnum):
    """Registry of the endpoints whose turns run over prefill and decode, by path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"

    @property
    def api(self) -> Api:
        """What is particular to it."""
        return _APIS[self]


_APIS: Final[Mapping[str, Api]] = {
    Endpoint.CHAT: Chat(),
    Endpoint.COMPLETIONS: Completions(),
    Endpoint.RESPONSES: Responses(),
    Endpoint.MESSAGES: Messages(),
}


def api_of(path: str) -> Api:
    """In whose shape an error is told, of paths that are no turns too."""
    if (api := _APIS.get(path)) is not None:
        return api
    above = (api for at, api in _APIS.items() if api.covers_paths_below and path.startswith(at))
    return next(above, Endpoint.CHAT.api)


class Facts(msgspec.Struct, frozen=True):
    """Parsed request: what the router needs to know of it. Everything else stays in `members`, unread."""

    endpoint: Endpoint
    members: Members
    """Sanitised; without `conversation_id`, which is ours."""
    ids: Mapping[str, object]
    """What of the body may name the conversation (`_IDS`), of whatever type."""
    model: str
    stream: bool
    wants_usage: bool
    wants_token_ids: bool
    cache_salt: str
    messages: tuple[bytes, ...]
    """The history's messages as they were sent, a system prompt or instructions first; for completions the prompt is the
    only one."""
    parts: tuple[bytes, ...]
    """What is compared with earlier turns: the messages without what engines ignore, or the prompt in whole pieces, so that a
    longer prompt that begins with an earlier one is known to continue it."""
    prompt_ids: tuple[int, ...] | None
    """Token ids, when that is what the client sent."""
    multiple: bool
    """Several sequences are asked for, and a handle serves one."""
    alone: str | None
    """The field for whose sake the request goes to D alone, as it is; `None` when it may be split into legs."""
    unproven: str | None
    """What keeps the router from sending token ids in place of the messages."""
    answer_limit: int | None
    """The client's limit of the answer's tokens."""

    @property
    def api(self) -> Api:
        return self.endpoint.api

    def stream_filter(
        self, count: UsageCallback, account: AccountCallback | None = None, accumulator: AnswerAccumulator | None = None
    ) -> StreamFilter:
        """What watches the stream that answers the request."""
        listeners = Listeners(count, account, accumulator, self.wants_usage, self.wants_token_ids)
        return self.api.stream_filter(listeners)


_IDS: Final = ("conversation_id", "session_id", "conversation", "previous_response_id", "prompt_cache_key")
_USER: Final = "metadata.user_id"
_INTERNED_CHARS: Final = 256
"""Longest name of a model that is kept once for all requests."""


def read_request(endpoint: Endpoint, body: bytes) -> Facts:
    """Parses a client's body once. A field whose type is not the expected one is left for the engine to judge: the request
    goes to D alone. Raises `MalformedBody`."""
    api, members = endpoint.api, read_members(body)
    ids = _ids(members)
    members.pop("conversation_id", None)
    known: dict[str, Any] = {}
    alone: str | None = None
    for key, types in api.types.items():
        if key not in members:
            continue
        value = value_of(members[key])
        if type(value) in types:
            known[key] = value
        else:
            alone = alone or key
    if alone is None and not api.alone.isdisjoint(members):
        alone = next((key for key in members if key in api.alone and is_set(members[key])), None)
    limit: int | None = None
    for key in api.positive:
        if (number := known.get(key)) is not None:
            if number < 1:
                alone = alone or key
            if key != "n" and (limit is None or number < limit):
                limit = number
    options = known.get("stream_options") or {}
    history = api.history(members)
    return Facts(
        endpoint=endpoint,
        members=members,
        ids=ids,
        model=interned(model) if len(model := known.get("model") or "") <= _INTERNED_CHARS else model,
        stream=bool(known.get("stream")),
        # The engine takes 1 and "true" for true as well, and says so where it takes a value for neither.
        wants_usage=api.reports_usage or options.get("include_usage") not in (None, False),
        wants_token_ids=api.asks_for_ids is not None and is_set(members.get(api.asks_for_ids)),
        cache_salt=known.get("cache_salt") or "",
        messages=history.messages,
        parts=history.parts,
        prompt_ids=history.prompt_ids,
        multiple=(known.get("n") or 1) > 1 or (known.get("best_of") or 1) > 1 or bool(known.get("use_beam_search")),
        alone=alone or history.odd or api.decode_only(members),
        unproven=history.unproven,
        answer_limit=limit,
    )


def _ids(members: Members) -> dict[str, object]:
    ids: dict[str, object] = {key: value_of(members[key]) for key in _IDS if key in members}
    if "metadata" in members:
        metadata = value_of(members["metadata"])
        if isinstance(metadata, dict) and "user_id" in metadata:
            ids[_USER] = metadata["user_id"]
    return ids
