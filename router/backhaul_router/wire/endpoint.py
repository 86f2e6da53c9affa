"""Strategy per endpoint: what differs between those whose turns run over prefill and decode, one `Api` each, without state.

Which fields of a request matter and where its history is; what P is not sent; where an answer and a stream have their ids and
token counts; how an error looks. The rest of the wire is the same for all, and so is the turn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Final

import msgspec
from msgspec import Raw

from ..errors import error_body, error_event
from .json_members import NULL, Members
from .stream import Listeners, StreamFilter
from .usage import Usage

BOOL: Final = (bool, type(None))
INT: Final = (int, type(None))
TEXT: Final = (str, type(None))
OBJECT: Final = (dict, type(None))

Types = Mapping[str, tuple[type, ...]]


class History(msgspec.Struct, frozen=True):
    """Parsed history: what a request says of the conversation so far; fields as in `Facts`."""

    messages: tuple[bytes, ...] = ()
    parts: tuple[bytes, ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    odd: str | None = None
    """The field that cannot be read: the engine is to say what is wrong with it."""
    unproven: str | None = None


class Api(ABC):
    """Strategy of one endpoint: everything that is particular to it, and nothing else."""

    types: ClassVar[Types]
    """Fields that the router reads. One of another type is left for the engine to judge."""
    limit: ClassVar[str]
    """The field that limits the answer's tokens, as P is sent it."""
    positive: ClassVar[tuple[str, ...]]
    """Numbers of which P would not notice that they are below 1."""
    alone: ClassVar[frozenset[str]]
    """Fields for whose sake D gets the request alone, where they are set."""
    not_for_prefill: ClassVar[frozenset[str]]
    asks_for_ids: ClassVar[str | None] = None
    """The field that makes an engine say which ids it ran and made."""
    shows_ids: ClassVar[bool] = False
    """An engine that was asked for ids and shows none did not run those that it was sent."""
    numbered: ClassVar[bool] = True
    """A history has messages that can be numbered; a completion's prompt is one."""
    streams_handles_since: ClassVar[tuple[int, int] | None] = (0, 33)
    """The vLLM release since which its own streams carry the handle; where they do not (`None`: in no release), our plugin
    puts it there."""
    refers_to_answers: ClassVar[bool] = False
    """A request can go on from an earlier answer by its id."""
    reports_usage: ClassVar[bool] = True
    """Every stream ends with usage, asked for or not."""
    exact_histories: ClassVar[bool] = False
    """Its answers can be put back as the tokens that the engine made (`exact_history`)."""
    tokenized: ClassVar[frozenset[str]] = frozenset()
    """Fields of a request that the engine's `/tokenize` honours; none where it cannot be asked."""
    tokenized_of_message: ClassVar[frozenset[str] | None] = None
    """The same of each message; `None` where there are no messages to look at."""
    covers_paths_below: ClassVar[bool] = False
    """Errors of paths below the endpoint's have its shape too."""
    operation: ClassVar[str] = "chat"
    """OpenTelemetry's `gen_ai.operation.name`."""

    @abstractmethod
    def history(self, members: Members) -> History: ...

    def decode_only(self, members: Members) -> str | None:
        """What else keeps the request from being split into legs."""
        return None

    def for_prefill(self, members: Members) -> Members:
        """What P's request has besides."""
        return {}

    def for_usage(self, members: Members) -> Members:
        """What makes a stream report its usage, where the client did not ask for it."""
        return {}

    def put_ids(self, members: Members, params: Members, ids: Raw) -> None:
        """The prompt's ids, in place of the messages."""
        params["prompt_token_ids"] = ids

    @abstractmethod
    def read_usage(self, raw: Raw) -> Usage:
        """Raises `msgspec.DecodeError`."""

    @abstractmethod
    def read_ids(self, members: Members) -> tuple[tuple[int, ...] | None, Raw]:
        """The ids that were generated, and, as JSON, those that were run. Raises `msgspec.DecodeError`."""

    @abstractmethod
    def hide_ids(self, members: Members) -> None:
        """Takes out of a whole answer the ids that only the router asked for."""

    @abstractmethod
    def stream_filter(self, listeners: Listeners) -> StreamFilter:
        """What watches a stream of answers; its accumulator is fed where the API has `exact_histories`."""

    def error(self, message: str, *, type_: str, code: str, param: str | None = None) -> bytes:
        return error_body(message, type_=type_, code=code, param=param)

    def error_event(self, message: str, *, type_: str, code: str, events: int = 0) -> bytes:
        """The same for a stream that breaks; `events` have gone before it."""
        return error_event(message, type_=type_, code=code)


def usage_of(api: Api, raw: Raw | bytes | None) -> Usage | None:
    """Raises `msgspec.DecodeError`."""
    return None if raw is None or bytes(raw) == b"null" else api.read_usage(Raw(raw))


NO_IDS: Final = (None, NULL)
