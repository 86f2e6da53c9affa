"""Client requests: what the router needs to know of one, read once; and the bodies that engines are sent in its place, for
rendering, for P, for D and to release a handle. Registry of the endpoints whose turns are run.

Bodies are split into their top-level members and put together again (`json_members`); ours is written last. What is particular
to an endpoint is in its `Api`; a new one is a subclass and a line in `_APIS`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec
from backhaul_protocol import KEY
from backhaul_protocol.messages import Ask
from msgspec import Raw

from .chat import Chat
from .completions import Completions
from .endpoint import Api
from .exact_history import AnswerAccumulator
from .handle import asking
from .json_members import (
    FALSE,
    HANDLE,
    NULL,
    ONE,
    TRUE,
    Members,
    decode_members,
    encode,
    interned,
    is_set,
    join,
    read_members,
    split,
    value_of,
)
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


def prefill_body(facts: Facts, token_ids: Sequence[int] | Raw | None, handle: Members | None) -> bytes:
    """P's leg: one token, not streamed, blocks kept for D. `handle` is what `cut_handle` or `whole_handle` made of D's. Here
    and in `decode_body` the ids may have been encoded before (`encode_ids`)."""
    api = facts.api
    members = {key: value for key, value in facts.members.items() if key not in api.not_for_prefill}
    members |= {"stream": FALSE, api.limit: ONE, **api.for_prefill(members)}
    params = {**(handle or {}), "do_remote_decode": TRUE, "do_remote_prefill": FALSE}
    _put_ids(facts, members, params, token_ids)
    members[HANDLE] = Raw(join(params))
    return join(members)


def decode_body(
    facts: Facts,
    token_ids: Sequence[int] | Raw | None,
    handle: bytes | None,
    *,
    ids_back: bool,
    ask: Ask | None = None,
    passed_on: bytes | None = None,
) -> bytes:
    """D's leg. `handle` is P's, sent verbatim; without one D runs the turn alone, and an empty object still tells our
    plugin that a router asks. `ids_back` asks for the generated ids (not streamed: a stream has them in its last event).
    `ask` is for a D that runs our connector, as is what P's says to it (`passed_on`)."""
    api, members = facts.api, dict(facts.members)
    if facts.stream and not facts.wants_usage:
        members |= api.for_usage(members)
    if ids_back and api.asks_for_ids is not None and (api.shows_ids or not facts.stream):
        members[api.asks_for_ids] = TRUE
    params = decode_members(handle) if handle else {}
    if handle:
        params["do_remote_prefill"] = TRUE
        params["do_remote_decode"] = FALSE
    _put_ids(facts, members, params, token_ids)
    if ask is not None:
        params[KEY] = asking(ask, passed_on)
    if params or ids_back:
        members[HANDLE] = Raw(join(params))
    return join(members)


def encode_ids(token_ids: Sequence[int]) -> Raw:
    """Token ids as JSON."""
    return Raw(encode(token_ids))


def _put_ids(facts: Facts, members: Members, params: Members, token_ids: Sequence[int] | Raw | None) -> None:
    if token_ids is None:
        return
    facts.api.put_ids(members, params, token_ids if isinstance(token_ids, Raw) else encode_ids(token_ids))


def release_body(handle: bytes) -> bytes:
    """A request that an engine of the other role rejects before admission (no such model), which makes it tell the holder
    to free the handle's blocks at once: nothing is computed, nothing pinned (vLLM PR 41269)."""
    params = decode_members(handle)
    params["do_remote_prefill"] = TRUE
    params["do_remote_decode"] = FALSE
    return encode(
        {"model": "backhaul-release", "prompt": [0], "max_tokens": 1, "stream": False, HANDLE: params},
    )


def render_body(facts: Facts) -> bytes:
    """What the engine's own renderer is asked: the client's request, sanitised."""
    return join(facts.members)


def rendering(facts: Facts) -> bytes:
    """A digest of what a template sees of a request besides its messages."""
    left_out = _TOKENIZE_IRRELEVANT | {"messages", "tool_choice"}
    given = {
        key: value for key, value in sorted(facts.members.items()) if key not in left_out and bytes(value) != b"null"
    }
    without_tools = bytes(facts.members.get("tool_choice", NULL)) == b'"none"'  # --exclude-tools-when-tool-choice-none
    return blake2b(join(given) + bytes([without_tools]), digest_size=16).digest()


_decode_stops = msgspec.json.Decoder(tuple[int, ...] | None).decode


def stop_tokens(facts: Facts) -> tuple[int, ...]:
    """Tokens that the client has end an answer."""
    try:
        return _decode_stops(facts.members.get("stop_token_ids", NULL)) or ()
    except msgspec.DecodeError:  # the engine is to say what it thinks of them
        return ()


def closed_body(facts: Facts, messages: int) -> bytes:
    """The same for the first messages alone, the last of which is an answer that has ended."""
    members = {key: value for key, value in facts.members.items() if key != "continue_final_message"}
    members["messages"] = Raw(b"[" + b",".join(facts.messages[:messages]) + b"]")
    members["add_generation_prompt"] = FALSE
    return join(members)


class _Rendered(msgspec.Struct):
    token_ids: tuple[int, ...] | None = None
    tokens: tuple[int, ...] | None = None
    features: Raw | None = None


_decode_rendered = msgspec.json.Decoder(_Rendered).decode


def read_rendered(body: bytes) -> tuple[int, ...] | None:
    """The ids in an answer of `/render` (one object for chat, a list of one for completions) or `/tokenize`; `None` where
    there is more to the prompt than ids (images), or the answer has another shape."""
    try:
        if body.lstrip().startswith(b"["):
            (rendered,) = msgspec.json.decode(body, type=list[_Rendered])
        else:
            rendered = _decode_rendered(body)
    except (msgspec.DecodeError, ValueError):
        return None
    if rendered.features is not None and bytes(rendered.features) != b"null":
        return None
    return rendered.token_ids or rendered.tokens or None


_TOKENIZE_IRRELEVANT: Final = frozenset(
    {"stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k"}
    | {"min_p", "seed", "stop", "stop_token_ids", "n", "user", "session_id", "cache_salt", "priority", "ignore_eos"}
    | {"frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "logprobs", "top_logprobs"}
    | {"return_token_ids", "parallel_tool_calls", "request_id", "metadata", "store", "service_tier", "prompt_cache_key"}
)


def tokenize_body(facts: Facts) -> bytes | None:
    """What `/tokenize` is asked, or `None` when the request holds a key that 0.32's `/tokenize` would ignore while serving
    honours it: the ids would then be another prompt's."""
    allowed, of_message = facts.api.tokenized, facts.api.tokenized_of_message
    if not allowed:
        return None
    if of_message is not None and not all(split(message).keys() <= of_message for message in facts.messages):
        return None
    given = {key: value for key, value in facts.members.items() if bytes(value) != b"null"}
    if not given.keys() <= allowed | _TOKENIZE_IRRELEVANT:
        return None
    return join({key: value for key, value in given.items() if key in allowed})
