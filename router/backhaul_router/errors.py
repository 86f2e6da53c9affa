"""Exception hierarchy: what can go wrong, whose fault it was, and how it is told in OpenAI's error shape."""

from __future__ import annotations

import enum

import msgspec
import openai


class BackhaulError(openai.OpenAIError):
    """Base of Backhaul's own exceptions. An `openai.OpenAIError`, so that openai's client does not retry it."""


class ConfigError(BackhaulError):
    """The configuration cannot work: the message names the field or engine, and what to change."""


class LeaseError(BackhaulError):
    """An engine did not do what it was asked with its leases; the message says which and why."""


class Leg(enum.StrEnum):
    """A step of a turn that an engine performs."""

    RENDER = "render"
    PREFILL = "prefill"
    DECODE = "decode"


class FailureKind(enum.StrEnum):
    """How a call failed, which decides whether it can be sent again."""

    REFUSED = "refused"
    """No connection was made, so the engine never saw the request: it can be sent again safely."""
    TIMEOUT = "timeout"
    BROKEN = "broken"
    """The connection ended after the request was sent."""
    ERROR = "error"
    """The engine answered, with a server error. Never raised by a client: any status is an answer to it."""


def error_body(message: str, *, type_: str, code: str, param: str | None = None) -> bytes:
    """An error in the shape that OpenAI's clients parse."""
    return msgspec.json.encode({"error": {"message": message, "type": type_, "param": param, "code": code}})


def error_event(message: str, *, type_: str, code: str) -> bytes:
    """The same as a server-sent event, for a stream that breaks after its first byte."""
    return b"data: " + error_body(message, type_=type_, code=code) + b"\n\n"
