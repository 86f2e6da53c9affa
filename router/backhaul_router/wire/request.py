"""vLLM's wire protocol: what is read from a client's request, what P and D are sent, what comes back, and what never leaves.

Bodies are split into their top-level members and put together again (`members.py`); ours is written last. What differs between
endpoints is in `chat.py`, `completions.py`, `responses.py` and `messages.py`. Field names and rules are those of vLLM 0.32
(entrypoints/*/protocol.py, kv_connector/v1/nixl/pull_scheduler.py).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, TypeVar

import msgspec
from backhaul_protocol import KEY
from backhaul_protocol.account import Account
from backhaul_protocol.leases import Lease
from backhaul_protocol.messages import Ask
from msgspec import Raw

from . import connector_object
from .chat import Chat
from .completions import Completions
from .endpoint import NO_IDS, Api, Usage, usage_of, wanted
from .json_members import (
    FALSE,
    FORBIDDEN,
    HANDLE,
    NULL,
    ONE,
    TRUE,
    MalformedBody,
    Members,
    decode_any,
    decode_members,
    encode,
    is_set,
    join,
    passed_body,
    put_last,
    read_members,
    split,
    value_of,
    without,
    without_handles,
)
from .messages import Messages
from .responses import Responses

__all__ = [
    "FORBIDDEN",
    "HANDLE",
    "Answer",
    "Endpoint",
    "Facts",
    "Handle",
    "MalformedBody",
    "Members",
    "Params",
    "Usage",
    "api_of",
    "client_answer",
    "closed_body",
    "cut_handle",
    "decode_body",
    "encode_ids",
    "error_message",
    "join",
    "passed_body",
    "prefill_body",
    "process_of",
    "quotes_handle",
    "read_answer",
    "read_handle",
    "read_ids",
    "read_left",
    "read_params",
    "read_rendered",
    "read_request",
    "read_usage",
    "release_body",
    "render_body",
    "split",
    "tokenize_body",
    "whole_handle",
    "with_note",
    "without_handles",
]


class Endpoint(enum.StrEnum):
    """The endpoints whose turns run over prefill and decode."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"

    @property
    def api(self) -> Api:
        """What is particular to it."""
        return _APIS[self]


_APIS: Final[Mapping[Endpoint, Api]] = {
    Endpoint.CHAT: Chat(),
    Endpoint.COMPLETIONS: Completions(),
    Endpoint.RESPONSES: Responses(),
    Endpoint.MESSAGES: Messages(),
}


def api_of(path: str) -> Api:
    """In whose shape an error is told: of paths that are no turns, only Anthropic's have another than OpenAI's."""
    if path in _APIS:
        return Endpoint(path).api
    return (Endpoint.MESSAGES if path.startswith(Endpoint.MESSAGES) else Endpoint.CHAT).api


class Facts(msgspec.Struct, frozen=True):
    """What the router needs to know of one request. Everything else stays in `members`, unread."""

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


_IDS: Final = ("conversation_id", "session_id", "conversation", "previous_response_id", "prompt_cache_key")
_USER: Final = "metadata.user_id"


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
        model=_shared(model) if len(model := known.get("model") or "") <= _SHARED_CHARS else model,
        stream=bool(known.get("stream")),
        # The engine takes 1 and "true" for true as well, and says so where it takes a value for neither.
        wants_usage=api.reports_usage or options.get("include_usage") not in (None, False),
        wants_token_ids=wanted(members, api.asks_for_ids),
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


# --- what the engines are sent -------------------------------------------------------------------------------------------


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


_TOKENIZE_CHAT: Final = frozenset(
    {"model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens"}
    | {"chat_template", "chat_template_kwargs"}
)
_TOKENIZE_IRRELEVANT: Final = frozenset(
    {"stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k"}
    | {"min_p", "seed", "stop", "stop_token_ids", "n", "user", "session_id", "cache_salt", "priority", "ignore_eos"}
    | {"frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "logprobs", "top_logprobs"}
    | {"return_token_ids", "parallel_tool_calls", "request_id", "metadata", "store", "service_tier", "prompt_cache_key"}
)
_TOKENIZE_MESSAGE: Final = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning"})


def tokenize_body(facts: Facts) -> bytes | None:
    """What `/tokenize` is asked, or `None` when the request holds a key that 0.32's `/tokenize` would ignore while serving
    honours it: the ids would then be another prompt's."""
    if facts.endpoint is Endpoint.COMPLETIONS:
        allowed = frozenset({"model", "prompt", "add_special_tokens"})
    elif facts.endpoint is not Endpoint.CHAT:
        return None
    else:
        allowed = _TOKENIZE_CHAT
        for message in facts.messages:
            if not split(message).keys() <= _TOKENIZE_MESSAGE:
                return None
    given = {key: value for key, value in facts.members.items() if bytes(value) != b"null"}
    if not given.keys() <= allowed | _TOKENIZE_IRRELEVANT:
        return None
    return join({key: value for key, value in given.items() if key in allowed})


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
        params[KEY] = connector_object.asking(ask, passed_on)
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


# --- handles -------------------------------------------------------------------------------------------------------------

_REQUIRED: Final = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_REQUIRED_KEYS: Final = frozenset(_REQUIRED)


class Handle(msgspec.Struct, frozen=True, gc=False):
    """An engine's `kv_transfer_params`: where one request's blocks lie. Unknown fields are carried verbatim."""

    params: bytes
    engine_id: str
    request_id: str
    tokens: int
    """Tokens whose KV the engine says it holds (`remote_num_tokens`)."""
    blocks: int
    """Blocks pinned, over all KV cache groups."""
    groups: int
    cached: int | None
    """P's answer only: tokens that P found cached or read (`remote_prefill_cached_tokens`)."""
    passed_on: bytes | None = None
    """What our connector says beside the handle to the engine that it is for."""
    digests: bool = False
    """D's: it carries digests of its blocks, so that a P of ours can check it by itself."""
    lease: Lease | None = None
    """D's: what it promises, where it runs our connector. The lease's id is `request_id`."""
    whole: bool = False
    """D's: it cannot be cut, since a sliding window has left blocks behind. Only a P of ours can tell what it is good for."""


_T = TypeVar("_T", bound=Hashable)
_SHARED_CHARS: Final = 256


@lru_cache(maxsize=256)
def _shared(value: _T) -> _T:
    """The same value as ever: what all conversations have in common is kept once."""
    return value


_RANK: Final = re.compile(r"_dp\d+$")


def process_of(engine_id: str) -> str:
    """What an engine's restart changes: the id without the data-parallel rank (vLLM's v1/engine/core.py)."""
    return _RANK.sub("", engine_id) if "_dp" in engine_id else engine_id


class _Params(msgspec.Struct):
    remote_block_ids: list[list[int]] | None
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int | str
    remote_num_tokens: int = 0
    remote_prefill_cached_tokens: int | None = None
    transfer_mode: str = "pull"
    backhaul: Raw | msgspec.UnsetType = msgspec.UNSET


class _Beside(msgspec.Struct):
    backhaul: Raw = NULL


_NO_TOKENS: Final = Raw(b"0")
_FREED: Final = 0
"""vLLM's null block: it stands in a list for one that was freed."""
_decode_groups = msgspec.json.Decoder(list[list[int]]).decode
_decode_params = msgspec.json.Decoder(_Params).decode
_decode_beside = msgspec.json.Decoder(_Beside).decode


class Params(msgspec.Struct, frozen=True):
    """An engine's `kv_transfer_params`, read."""

    handle: Handle | None = None
    token_ids: tuple[int, ...] | None = None
    """Generated ids, which our plugin adds where there is no handle as well."""
    account: Account | None = None


_NO_PARAMS: Final = Params()


def read_params(raw: Raw | bytes | None) -> Params:
    """No handle is found where a required field is missing, where it holds no blocks, or was made for push transfer.

    Raises `msgspec.DecodeError`."""
    if raw is None or (kept := bytes(raw)) == b"null":
        return _NO_PARAMS
    try:
        params = _decode_params(kept)
    except msgspec.ValidationError:
        if decode_members(kept).keys() >= _REQUIRED_KEYS:
            raise
        said = connector_object.read(_decode_beside(kept).backhaul)
        return Params(None, said.token_ids, said.account)
    said = connector_object.NOTHING
    if params.backhaul is not msgspec.UNSET:
        said = connector_object.read(params.backhaul)
        kept = without(kept, KEY, params.backhaul)
    nothing = Params(None, said.token_ids, said.account)
    groups = params.remote_block_ids or ()
    blocks = sum(map(len, groups))
    if not blocks or params.transfer_mode != "pull":
        return nothing
    handle = Handle(
        params=kept,
        engine_id=_shared(params.remote_engine_id),
        request_id=params.remote_request_id,
        tokens=params.remote_num_tokens,
        blocks=blocks,
        groups=len(groups),
        cached=params.remote_prefill_cached_tokens,
        passed_on=said.passed_on,
        digests=said.digests,
        lease=_shared(said.lease),
        whole=said.whole or any(_FREED in ids for ids in groups),
    )
    return Params(handle, said.token_ids, said.account)


def read_handle(raw: Raw | bytes | None) -> tuple[Handle | None, tuple[int, ...] | None]:
    """The handle and the generated ids of `read_params`."""
    params = read_params(raw)
    return params.handle, params.token_ids


def no_handle(raw: Raw | bytes | None) -> str:
    """What `kv_transfer_params` are in which `read_params` finds no handle. Says nothing that a client must not see."""
    if raw is None or bytes(raw) == b"null":
        return f"no {HANDLE}"
    members = decode_members(raw)
    if not members:
        return f"no {HANDLE}"
    if not members.keys() >= _REQUIRED_KEYS:
        return f"{HANDLE} of another connector than NIXL's"
    if _decode_params(join(members)).transfer_mode != "pull":
        return f"{HANDLE} for another transfer mode than pull"
    return f"{HANDLE} that hold no blocks"


def no_handle_in(body: bytes) -> str:
    """The same of an engine's whole answer."""
    return no_handle(split(body).get(HANDLE))


def whole_handle(handle: Handle) -> Members:
    """The handle for a P of ours, which finds out by itself what of it to claim. Any other P, such as one that was restarted
    without our connector, finds no token in it to read: it could not tell whether they are this prompt's."""
    members = decode_members(handle.params)
    members["remote_num_tokens"] = _NO_TOKENS
    if handle.passed_on is not None:
        members[KEY] = Raw(handle.passed_on)
    return members


def cut_handle(handle: Handle, blocks: int, block_size: int, *, to_ours: bool = False) -> Members:
    """The handle for its `blocks` leading blocks alone, without what our connector says of the whole. P trims block lists
    from their front, so the token count and every list must be cut together: cutting one of them reads KV of other positions.
    A P of ours is told that the router proved what it was cut to."""
    members = decode_members(handle.params)
    groups = _decode_groups(members["remote_block_ids"])
    members["remote_block_ids"] = Raw(encode([group[:blocks] for group in groups]))
    members["remote_num_tokens"] = Raw(encode(blocks * block_size))
    if to_ours:
        members[KEY] = connector_object.PROVEN_BY_TOKENS
    return members


# --- what comes back -----------------------------------------------------------------------------------------------------


def read_usage(raw: Raw | bytes | None) -> Usage | None:
    """`usage` of chat and completions. Raises `msgspec.DecodeError`."""
    return usage_of(Endpoint.CHAT.api, raw)


read_ids = msgspec.json.Decoder(tuple[int, ...] | None).decode


class Answer(msgspec.Struct, frozen=True):
    """A whole answer of an engine, read."""

    members: Members
    params: Params
    usage: Usage | None
    generated: tuple[int, ...] | None
    """The ids that it made, where it says so and there is one sequence."""
    ran: Raw
    """The prompt's ids as JSON, likewise."""

    @property
    def id(self) -> str | None:
        """By which later requests can name it."""
        value = value_of(self.members.get("id", NULL))
        return value if isinstance(value, str) else None


class _Left(msgspec.Struct):
    kv_transfer_params: Raw = NULL
    usage: Raw = NULL


_decode_left = msgspec.json.Decoder(_Left).decode


def read_left(endpoint: Endpoint, body: bytes) -> tuple[Params, Usage | None]:
    """What counts of P's answer, whose one token nobody sees. Raises `MalformedBody` or `msgspec.DecodeError`."""
    try:
        left = _decode_left(body)
    except RecursionError:
        raise MalformedBody("it is nested too deeply") from None
    return read_params(left.kv_transfer_params), usage_of(endpoint.api, left.usage)


def read_answer(endpoint: Endpoint, body: bytes | Members, *, ids: bool = True) -> Answer:
    """With `ids` those that the engine says it ran and made, else none. Raises `MalformedBody` or `msgspec.DecodeError`."""
    members = split(body) if isinstance(body, bytes) else body
    params = read_params(members.get(HANDLE))
    generated, ran = endpoint.api.read_ids(members) if ids else NO_IDS
    return Answer(members, params, usage_of(endpoint.api, members.get("usage")), generated, ran)


def client_answer(facts: Facts, members: Members, note: Mapping[str, object] | None) -> bytes:
    """A whole answer as the client may see it: no transfer parameters, no ids that it did not ask for, our note in `usage`."""
    out = {key: value for key, value in members.items() if key not in FORBIDDEN}
    if not facts.wants_token_ids:
        facts.api.hide_ids(out)
    if note is not None and "usage" in out:
        out["usage"] = Raw(with_note(out["usage"], note))
    return join(out)


_NAMES_US: Final = f'"{KEY}"'.encode()


def with_note(usage: Raw | bytes, note: Mapping[str, object]) -> bytes:
    """`usage` with our account of the turn under `backhaul`; anything else in it stays as it is."""
    if bytes(usage) == b"null":
        return bytes(usage)
    if b'"' not in bytes(usage) or _NAMES_US in bytes(usage):
        return encode({**decode_members(usage), KEY: note})
    return put_last(bytes(usage), KEY, encode(note))


def disowns_model(body: bytes) -> bool:
    """Whether an engine's 404 says that it does not serve the model, and not that it lacks something else."""
    try:
        error = decode_any(body)["error"]
        return error.get("param") == "model" or "The model `" in error["message"]
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return False


def quotes_handle(body: bytes) -> bool:
    """Whether an engine's error says where blocks lie."""
    return any(key.encode() in body for key in _REQUIRED)


def error_message(body: bytes) -> str:
    """What an engine's error body says, shortened; the body itself when it has another shape. Nothing of a handle."""
    if quotes_handle(body):
        return "(not shown: it quotes a handle)"
    try:
        decoded = decode_any(body)
        error = decoded["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (msgspec.DecodeError, KeyError, TypeError):
        text = body.decode(errors="replace")
    return str(text)[:500]
