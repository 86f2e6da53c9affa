"""vLLM's wire protocol: what is read from a client's request, what P and D are sent, what comes back, and what never leaves.

Bodies are split into their top-level members and put together again; the members' own bytes are not re-encoded. Splitting
decodes the keys, so every spelling of a forbidden key (escapes, duplicates) is the same key and gone, and ours is written last.
Field names and rules are those of vLLM 0.32 (entrypoints/openai/*/protocol.py, kv_connector/v1/nixl/pull_scheduler.py).
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import Raw

from . import extension
from .errors import BackhaulError
from .extension import Account, Ask, Lease

HANDLE = "kv_transfer_params"
FORBIDDEN: Final = frozenset({HANDLE, "ec_transfer_params"})
"""Name hosts, ports and blocks of engines: neither taken from a client nor shown to one."""
EXTENSION = extension.KEY
"""Key of the versioned object that our plugin and our connector put into a handle."""

Members = dict[str, Raw]

_NULL: Final = Raw(b"null")
_FALSE: Final = Raw(b"false")
_TRUE: Final = Raw(b"true")
_ONE: Final = Raw(b"1")

_decode_members = msgspec.json.Decoder(Members).decode
_decode_list = msgspec.json.Decoder(list[Raw]).decode
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.encode


class MalformedBody(BackhaulError):
    """A body is not a JSON object; the message is meant for the client."""


class Endpoint(enum.StrEnum):
    """The endpoints whose turns run over prefill and decode."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


def split(body: bytes) -> Members:
    """The top-level members of a JSON object. Of repeated keys the last counts, as in Python's own decoder.

    Raises `MalformedBody`.
    """
    try:
        return _decode_members(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedBody(f"the body is not a JSON object: {error}") from None


def join(members: Mapping[str, Raw]) -> bytes:
    """The members as one JSON object again."""
    return _encode(members)


def read_members(body: bytes) -> Members:
    """The members of a client's body that may travel: no transfer parameters, neither at the top nor inside `vllm_xargs`.

    Raises `MalformedBody`, also for text that is not UTF-8: Python's decoder, which reads the body after us, takes some of it.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise MalformedBody(f"the body is not a JSON object: it is not UTF-8 at byte {error.start}") from None
    members = split(body)
    kept = {key: value for key, value in members.items() if key not in FORBIDDEN}
    if "vllm_xargs" in kept:
        try:
            inner = _decode_members(kept["vllm_xargs"])
        except msgspec.DecodeError:
            return kept
        if FORBIDDEN & inner.keys():
            kept["vllm_xargs"] = Raw(join({k: v for k, v in inner.items() if k not in FORBIDDEN}))
    return kept


@dataclass(frozen=True, slots=True)
class Facts:
    """What the router needs to know of one request. Everything else stays in `members`, unread."""

    endpoint: Endpoint
    members: Members
    """Sanitised; without `conversation_id`, which is ours."""
    ids: Mapping[str, object]
    """The body's values of `conversation_id` and `session_id`, of whatever type."""
    model: str
    stream: bool
    wants_usage: bool
    wants_token_ids: bool
    cache_salt: str
    messages: tuple[bytes, ...]
    """The history's messages as they were sent; for completions the prompt is the only one."""
    parts: tuple[bytes, ...]
    """What is compared with earlier turns: the messages, or the prompt in whole pieces, so that a longer prompt that begins
    with an earlier one is known to continue it."""
    prompt_ids: tuple[int, ...] | None
    """Token ids, when that is what the client sent."""
    multiple: bool
    """Several sequences are asked for, and a handle serves one."""
    alone: str | None
    """The field for whose sake the request goes to D alone, as it is; `None` when it may be split into legs."""
    unproven: str | None
    """What keeps the router from sending token ids in place of the messages."""


_BOOL = (bool, type(None))
_INT = (int, type(None))
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "model": (str, type(None)),
    "stream": _BOOL,
    "stream_options": (dict, type(None)),
    "n": _INT,
    "best_of": _INT,
    "use_beam_search": _BOOL,
    "cache_salt": (str, type(None)),
    "echo": _BOOL,
    "return_token_ids": _BOOL,
    "max_tokens": _INT,
    "max_completion_tokens": _INT,
}
# The prompt would not be what was compared (truncation depends on each leg's token limit, embeddings replace it), or the
# answer describes the prompt, which D would not have computed.
_ALONE: Final = (
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "truncation_side",
    "suffix",
    "prompt_embeds",
    "return_prompt_text",
    "return_token_offsets",
    "routed_experts_prompt_start",
    "mm_payload",
    "return_mm_kwargs",
)


def passed_body(body: bytes) -> bytes:
    """A client's body for an endpoint that the router does not read otherwise. Raises `MalformedBody`."""
    return join(read_members(body))


def _value(raw: Raw) -> object:
    try:
        return _decode_any(raw)
    except msgspec.ValidationError:
        return math.inf  # a number out of range, which Python's decoder reads as this


def read_request(endpoint: Endpoint, body: bytes) -> Facts:
    """Parses a client's body once. A field whose type is not the expected one is left for the engine to judge: the request
    goes to D alone. Raises `MalformedBody`."""
    members = read_members(body)
    ids: dict[str, object] = {key: _value(members[key]) for key in ("conversation_id", "session_id") if key in members}
    members.pop("conversation_id", None)
    known: dict[str, Any] = {}
    alone: str | None = None
    for key, types in _TYPES.items():
        if key not in members:
            continue
        value = _value(members[key])
        if type(value) in types:
            known[key] = value
        else:
            alone = alone or key
    for key in _ALONE:
        if key in members and bytes(members[key]) not in (b"null", b"false"):
            alone = alone or key
    if known.get("echo"):
        alone = alone or "echo"
    for key in ("max_tokens", "max_completion_tokens", "n"):
        # To be rejected, but for `echo`: P, which is asked for one token and one sequence, would not.
        if (number := known.get(key)) is not None and number < 1:
            alone = alone or key
    options = known.get("stream_options") or {}
    messages, prompt_ids, odd, unproven = _history(endpoint, members)
    return Facts(
        endpoint=endpoint,
        members=members,
        ids=ids,
        model=known.get("model") or "",
        stream=bool(known.get("stream")),
        # The engine takes 1 and "true" for true as well, and says so where it takes a value for neither.
        wants_usage=options.get("include_usage") not in (None, False),
        wants_token_ids=bool(known.get("return_token_ids")),
        cache_salt=known.get("cache_salt") or "",
        messages=messages,
        parts=messages if endpoint is Endpoint.CHAT else _pieces(messages),
        prompt_ids=prompt_ids,
        multiple=(known.get("n") or 1) > 1 or (known.get("best_of") or 1) > 1 or bool(known.get("use_beam_search")),
        alone=alone or odd,
        unproven=unproven,
    )


_PIECE = 256


def _pieces(prompts: Sequence[bytes]) -> tuple[bytes, ...]:
    """The one prompt without its closing quote or bracket, in whole pieces."""
    whole = max(0, len(prompts[0]) - 1) // _PIECE * _PIECE if prompts else 0
    return tuple(prompts[0][i : i + _PIECE] for i in range(0, whole, _PIECE))


class _Message(msgspec.Struct):
    content: Raw | msgspec.UnsetType = msgspec.UNSET


class _Part(msgspec.Struct):
    type: str
    uuid: None = None
    """Beside one, as where there is no `type`, the engine goes by which other keys there are (vLLM's chat_utils.py)."""


_decode_message = msgspec.json.Decoder(_Message).decode
_decode_parts = msgspec.json.Decoder(list[str | _Part]).decode
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})


def _history(
    endpoint: Endpoint, members: Members
) -> tuple[tuple[bytes, ...], tuple[int, ...] | None, str | None, str | None]:
    """Messages, prompt ids, the oddly typed field, and what forbids a proof."""
    if endpoint is Endpoint.CHAT:
        try:
            raw = members.get("messages", Raw(b""))
            messages = tuple(map(bytes, _decode_list(raw)))
            # Content that is no text is a list; most messages hold none.
            contents = [_decode_message(message) for message in messages if b"[" in message]
        except (msgspec.DecodeError, RecursionError):
            return (), None, "messages", None
        if not messages or not all(message.startswith(b"{") for message in messages):
            return (), None, "messages", None
        return messages, None, None, _media(contents)
    prompt = bytes(members.get("prompt", Raw(b"null")))
    if prompt.startswith(b'"'):
        return (prompt,), None, None, None
    try:
        ids = msgspec.json.decode(prompt, type=list[int])
    except msgspec.DecodeError:
        return (), None, "prompt", None
    return ((prompt,), tuple(ids), None, None) if ids else ((), None, "prompt", None)


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


# --- what the engines are sent -------------------------------------------------------------------------------------------

_NOT_FOR_PREFILL: Final = frozenset(
    {
        "stream",
        "stream_options",
        "stream_interval",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "n",
        "best_of",
        # A stop string that the first token completes would abort the request, and with it P's handle.
        "stop",
        "include_stop_str_in_output",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "request_id",
    }
)


def render_body(facts: Facts) -> bytes:
    """What the engine's own renderer is asked: the client's request, sanitised."""
    return join(facts.members)


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
    | {"return_token_ids", "parallel_tool_calls", "request_id", "metadata", "store", "service_tier"}
)
_TOKENIZE_MESSAGE: Final = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning"})


def tokenize_body(facts: Facts) -> bytes | None:
    """What `/tokenize` is asked, or `None` when the request holds a key that 0.32's `/tokenize` would ignore while serving
    honours it: the ids would then be another prompt's."""
    if facts.endpoint is Endpoint.COMPLETIONS:
        allowed = frozenset({"model", "prompt", "add_special_tokens"})
    else:
        allowed = _TOKENIZE_CHAT
        for message in facts.messages:
            if not split(message).keys() <= _TOKENIZE_MESSAGE:
                return None
    given = {key: value for key, value in facts.members.items() if bytes(value) != b"null"}
    if not given.keys() <= allowed | _TOKENIZE_IRRELEVANT:
        return None
    return join({key: value for key, value in given.items() if key in allowed})


def prefill_body(facts: Facts, token_ids: Sequence[int] | Raw | None, handle: bytes | None) -> bytes:
    """P's leg: one token, not streamed, blocks kept for D. `handle` is what `cut_handle` made of D's. Here and in
    `decode_body` the ids may have been encoded before (`encode_ids`)."""
    members = {key: value for key, value in facts.members.items() if key not in _NOT_FOR_PREFILL}
    members["stream"] = _FALSE
    members["max_tokens"] = _ONE
    params = _decode_members(handle) if handle else {}
    params["do_remote_decode"] = _TRUE
    params["do_remote_prefill"] = _FALSE
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
    members = dict(facts.members)
    if facts.stream:
        options = _decode_any(members.get("stream_options", _NULL))
        if not facts.wants_usage and isinstance(options, dict | None):
            options = {**(options or {}), "include_usage": True, "continuous_usage_stats": False}
            members["stream_options"] = Raw(_encode(options))
    elif ids_back:
        members["return_token_ids"] = _TRUE
    params = _decode_members(handle) if handle else {}
    if handle:
        params["do_remote_prefill"] = _TRUE
        params["do_remote_decode"] = _FALSE
    _put_ids(facts, members, params, token_ids)
    if ask is not None:
        params[EXTENSION] = extension.asking(ask, passed_on)
    if params or ids_back:
        members[HANDLE] = Raw(join(params))
    return join(members)


def encode_ids(token_ids: Sequence[int]) -> Raw:
    """Token ids as JSON."""
    return Raw(_encode(token_ids))


def _put_ids(facts: Facts, members: Members, params: Members, token_ids: Sequence[int] | Raw | None) -> None:
    if token_ids is None:
        return
    encoded = token_ids if isinstance(token_ids, Raw) else encode_ids(token_ids)
    if facts.endpoint is Endpoint.CHAT:
        params["prompt_token_ids"] = encoded
    else:
        members["prompt"] = encoded


def release_body(handle: bytes) -> bytes:
    """A request that an engine of the other role rejects before admission (no such model), which makes it tell the holder
    to free the handle's blocks at once: nothing is computed, nothing pinned (vLLM PR 41269)."""
    params = _decode_members(handle)
    params["do_remote_prefill"] = _TRUE
    params["do_remote_decode"] = _FALSE
    return _encode(
        {"model": "backhaul-release", "prompt": [0], "max_tokens": 1, "stream": False, HANDLE: params},
    )


# --- handles -------------------------------------------------------------------------------------------------------------

_REQUIRED: Final = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")


@dataclass(frozen=True, slots=True)
class Handle:
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
    token_ids: tuple[int, ...] | None
    """Generated ids, where our plugin put them beside the handle."""
    passed_on: bytes | None = None
    """What our connector says beside the handle to the engine that it is for."""
    digests: bool = False
    """D's: it carries digests of its blocks, so that a P of ours can check it by itself."""
    lease: Lease | None = None
    """D's: what it promises, where it runs our connector. The lease's id is `request_id`."""


def process_of(engine_id: str) -> str:
    """What an engine's restart changes: the id without the data-parallel rank (vLLM's v1/engine/core.py)."""
    return re.sub(r"_dp\d+$", "", engine_id)


class _Params(msgspec.Struct):
    remote_block_ids: list[list[int]] | None
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int | str
    remote_num_tokens: int = 0
    remote_prefill_cached_tokens: int | None = None
    transfer_mode: str = "pull"


_decode_groups = msgspec.json.Decoder(list[list[int]]).decode
_decode_params = msgspec.json.Decoder(_Params).decode


@dataclass(frozen=True, slots=True)
class Params:
    """An engine's `kv_transfer_params`, read."""

    handle: Handle | None = None
    token_ids: tuple[int, ...] | None = None
    """Generated ids, which our plugin adds where there is no handle as well."""
    account: Account | None = None


def read_params(raw: Raw | bytes | None) -> Params:
    """No handle is found where a required field is missing, where it holds no blocks, or was made for push transfer.

    Raises `msgspec.DecodeError`."""
    if raw is None or bytes(raw) == b"null":
        return Params()
    members = _decode_members(raw)
    said = extension.read(members.pop(EXTENSION, None))
    nothing = Params(None, said.token_ids, said.account)
    if not all(key in members for key in _REQUIRED):
        return nothing
    kept = join(members)
    params = _decode_params(kept)
    groups = params.remote_block_ids or ()
    blocks = sum(map(len, groups))
    if not blocks or params.transfer_mode != "pull":
        return nothing
    handle = Handle(
        params=kept,
        engine_id=params.remote_engine_id,
        request_id=params.remote_request_id,
        tokens=params.remote_num_tokens,
        blocks=blocks,
        groups=len(groups),
        cached=params.remote_prefill_cached_tokens,
        token_ids=said.token_ids,
        passed_on=said.passed_on,
        digests=said.digests,
        lease=said.lease,
    )
    return Params(handle, said.token_ids, said.account)


def read_handle(raw: Raw | bytes | None) -> tuple[Handle | None, tuple[int, ...] | None]:
    """The handle and the generated ids of `read_params`."""
    params = read_params(raw)
    return params.handle, params.token_ids


def whole_handle(handle: Handle) -> bytes:
    """The handle for a P of ours, which finds out by itself what of it to claim. Any other P, such as one that was restarted
    without our connector, finds no token in it to read: it could not tell whether they are this prompt's."""
    members = {**_decode_members(handle.params), "remote_num_tokens": Raw(b"0")}
    if handle.passed_on is not None:
        members[EXTENSION] = Raw(handle.passed_on)
    return join(members)


def cut_handle(handle: Handle, blocks: int, block_size: int, *, to_ours: bool = False) -> bytes:
    """The handle for its `blocks` leading blocks alone, without what our connector says of the whole. P trims block lists
    from their front, so the token count and every list must be cut together: cutting one of them reads KV of other positions.
    A P of ours is told that the router proved what it was cut to."""
    members = _decode_members(handle.params)
    groups = _decode_groups(members["remote_block_ids"])
    members["remote_block_ids"] = Raw(_encode([group[:blocks] for group in groups]))
    members["remote_num_tokens"] = Raw(_encode(blocks * block_size))
    if to_ours:
        members[EXTENSION] = extension.PROVEN_BY_TOKENS
    return join(members)


# --- what comes back -----------------------------------------------------------------------------------------------------


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts as an engine reports them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached(self) -> int | None:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


_decode_usage = msgspec.json.Decoder(Usage).decode


def read_usage(raw: Raw | bytes | None) -> Usage | None:
    if raw is None or bytes(raw) == b"null":
        return None
    return _decode_usage(raw)


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: Raw = _NULL


_decode_choices = msgspec.json.Decoder(list[_Choice]).decode


def read_choices(members: Members) -> list[_Choice]:
    return _decode_choices(members.get("choices", Raw(b"[]")))


def returned_prompt_ids(members: Members, choice: _Choice) -> Raw:
    """The ids that the engine ran, where `return_token_ids` asked for them: chat has them at the top, completions per choice."""
    if bytes(choice.prompt_token_ids) != b"null":
        return choice.prompt_token_ids
    return members.get("prompt_token_ids", _NULL)


read_ids = msgspec.json.Decoder(tuple[int, ...] | None).decode


def client_answer(members: Members, *, keep_token_ids: bool, note: Mapping[str, object] | None) -> bytes:
    """A whole answer as the client may see it: no transfer parameters, no ids that it did not ask for, our note in `usage`."""
    out = {key: value for key, value in members.items() if key not in FORBIDDEN}
    if not keep_token_ids:
        if "prompt_token_ids" in out:
            out["prompt_token_ids"] = _NULL
        if "choices" in out:
            out["choices"] = Raw(_encode([_without_ids(choice) for choice in _decode_list(out["choices"])]))
    if note is not None and "usage" in out:
        out["usage"] = Raw(with_note(out["usage"], note))
    return join(out)


def without_handles(data: bytes) -> bytes:
    """A JSON body of any endpoint without transfer parameters, at the top or inside `response` (as the Responses API nests
    them in its events). What is no JSON object stays as it is."""
    if not any(key.encode() in data for key in FORBIDDEN):
        return data
    try:
        members = split(data)
    except MalformedBody:
        return data
    response = bytes(members.get("response", b""))
    cleaned = without_handles(response) if response.startswith(b"{") else response
    kept = {key: value for key, value in members.items() if key not in FORBIDDEN}
    if cleaned != response:
        kept["response"] = Raw(cleaned)
    return join(kept) if cleaned != response or len(kept) < len(members) else data


def _without_ids(choice: Raw) -> Members:
    members = _decode_members(choice)
    return {key: _NULL if key in ("token_ids", "prompt_token_ids") else value for key, value in members.items()}


def with_note(usage: Raw | bytes, note: Mapping[str, object]) -> bytes:
    """`usage` with our account of the turn under `backhaul`; anything else in it stays as it is."""
    if bytes(usage) == b"null":
        return bytes(usage)
    return _encode({**_decode_members(usage), EXTENSION: note})


def quotes_handle(body: bytes) -> bool:
    """Whether an engine's error says where blocks lie."""
    return any(key.encode() in body for key in _REQUIRED)


def error_message(body: bytes) -> str:
    """What an engine's error body says, shortened; the body itself when it has another shape. Nothing of a handle."""
    if quotes_handle(body):
        return "(not shown: it quotes a handle)"
    try:
        decoded = _decode_any(body)
        error = decoded["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (msgspec.DecodeError, KeyError, TypeError):
        text = body.decode(errors="replace")
    return str(text)[:500]
