"""Codec of an engine's own renderer: what `/render` and `/tokenize` are asked, and the token ids in their answers."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import msgspec
from msgspec import Raw

from .json_members import FALSE, NULL, join, split
from .request import Facts


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
