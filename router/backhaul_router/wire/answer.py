"""Decoder of engines' answers, and what of them the client is shown."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from .endpoint import NO_IDS, Api, usage_of
from .handle import Params, no_handle, quotes_handle, read_params
from .json_members import FORBIDDEN, HANDLE, NULL, MalformedBody, Members, decode_any, split, value_of
from .usage import Usage

read_ids = msgspec.json.Decoder(tuple[int, ...] | None).decode


class Answer(msgspec.Struct, frozen=True):
    """Decoded whole answer of an engine."""

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


def read_left(api: Api, body: bytes) -> tuple[Params, Usage | None]:
    """What counts of P's answer, whose one token nobody sees. Raises `MalformedBody` or `msgspec.DecodeError`."""
    try:
        left = _decode_left(body)
    except RecursionError:
        raise MalformedBody("it is nested too deeply") from None
    return read_params(left.kv_transfer_params), usage_of(api, left.usage)


def read_answer(api: Api, body: bytes | Members, *, ids: bool = True) -> Answer:
    """With `ids` those that the engine says it ran and made, else none. Raises `MalformedBody` or `msgspec.DecodeError`."""
    members = split(body) if isinstance(body, bytes) else body
    params = read_params(members.get(HANDLE))
    generated, ran = api.read_ids(members) if ids else NO_IDS
    return Answer(members, params, usage_of(api, members.get("usage")), generated, ran)


def client_answer(api: Api, members: Members, *, shows_ids: bool) -> Members:
    """A whole answer as the client may see it: no transfer parameters, ids only with `shows_ids`."""
    out = {key: value for key, value in members.items() if key not in FORBIDDEN}
    if not shows_ids:
        api.hide_ids(out)
    return out


def no_handle_in(body: bytes) -> str:
    """The same of an engine's whole answer."""
    return no_handle(split(body).get(HANDLE))


def disowns_model(body: bytes) -> bool:
    """Whether an engine's 404 says that it does not serve the model, and not that it lacks something else."""
    try:
        error = decode_any(body)["error"]
        return error.get("param") == "model" or "The model `" in error["message"]
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return False


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
