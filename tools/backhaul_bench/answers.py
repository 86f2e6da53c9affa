"""Answers of engines and routers as data: read, whole or streamed, and compared with each other."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

Json = Any
Choices = list[dict[str, Json]]
Post = Callable[[str, Mapping[str, Json]], Awaitable[Json]]
"""Sends a body to a path of one engine and returns its JSON answer."""

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

NEAR_TIE = 1e-4
"""Difference of two log probabilities that float32 does not tell apart when a prompt is computed in other pieces."""

_RANDOM = frozenset({"id", "created", "logprobs_token_offset"})
_UNSURE = 16  # characters: the parts of one character count as one each


class EngineTrouble(OSError):
    """An engine is gone, or does not answer what it must answer."""


@contextlib.contextmanager
def first_of_group() -> Iterator[None]:
    """Of tasks that ended together, the first one's exception is raised."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group


def events(raw: bytes) -> list[dict[str, Json]]:
    """The JSON of a stream's events. Raises `ValueError` for a stream that does not end with `[DONE]`, or holds an error."""
    *data, done, rest = raw.decode().split("\n\n")
    if (done, rest) != ("data: [DONE]", ""):
        raise ValueError(f"the stream ended with {raw[-200:]!r} instead of [DONE]")
    found: list[dict[str, Json]] = [json.loads(event.removeprefix("data: ")) for event in data]
    for event in found:
        if "error" in event:
            raise ValueError(f"the stream broke: {event['error']}")
    return found


def choices(raw: bytes, *, stream: bool) -> Choices:
    """The choices of an answer with status 200, in the shape of one that is not streamed."""
    return assemble(events(raw)) if stream else json.loads(raw)["choices"]


def assemble(chunks: Iterable[Mapping[str, Json]]) -> Choices:
    """What the chunks of a stream add up to."""
    whole: dict[int, dict[str, Json]] = {}
    for piece in (piece for chunk in chunks for piece in chunk["choices"]):
        choice = whole.setdefault(piece["index"], {"index": piece["index"], "finish_reason": None, "token_ids": []})
        choice["finish_reason"] = piece.get("finish_reason") or choice["finish_reason"]
        choice["token_ids"] += piece.get("token_ids") or []
        if "text" in piece:
            choice["text"] = choice.get("text", "") + piece["text"]
        else:
            _add_delta(choice.setdefault("message", {"role": "assistant", "content": ""}), piece["delta"])
    return [whole[index] for index in sorted(whole)]


def _add_delta(message: dict[str, Json], delta: Mapping[str, Json]) -> None:
    message["content"] += delta.get("content") or ""
    if delta.get("reasoning"):
        message["reasoning"] = message.get("reasoning", "") + delta["reasoning"]
    for part in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", [])
        while len(calls) <= part["index"]:
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call, function = calls[part["index"]], part.get("function") or {}
        call["id"] = part.get("id") or call["id"]
        for key in ("name", "arguments"):
            call["function"][key] += function.get(key) or ""


def message(choice: Mapping[str, Json]) -> dict[str, Json]:
    """What an agent puts into its history for a chat's choice."""
    return {"content": "", **{key: value for key, value in choice["message"].items() if value}}


def text(choice: Mapping[str, Json]) -> str:
    """A choice's text; of a tool call, its arguments."""
    if "message" not in choice:
        return str(choice["text"])
    calls = choice["message"].get("tool_calls") or ()
    return (choice["message"].get("content") or "") + "".join(call["function"]["arguments"] for call in calls)


def comparable(value: Json) -> Json:
    """Without what differs from one run to the next: random ids, and log probabilities beyond three digits."""
    if isinstance(value, Mapping):
        return {key: comparable(item) for key, item in value.items() if key not in _RANDOM}
    if isinstance(value, list):
        return [comparable(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


async def near_tie(post: Post, path: str, body: Mapping[str, Json], ours: Choices, expected: Choices) -> bool:
    """Whether two answers part at a token for which the reference has another one as good as equal: there the order of
    additions decides, and either is right. With wrong KV they part where one token is clearly the best."""
    if len(ours) != 1 or len(expected) != 1:
        return False
    a, b = text(ours[0]), text(expected[0])
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    asked = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    asked |= {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    said, unsure = 0, _UNSURE
    for token, best in _best_two((await post(path, asked))["choices"][0]["logprobs"]):
        if abs(said - same) <= unsure and best[0] - best[1] < NEAR_TIE:
            return True
        said += len(token)
        unsure += token.count("\ufffd")
    return False


def _best_two(logprobs: Mapping[str, Json]) -> Iterable[tuple[str, list[float]]]:
    """Each token of an answer, with the two highest log probabilities in its place."""
    if "content" in logprobs:
        found = [(entry["token"], [top["logprob"] for top in entry["top_logprobs"]]) for entry in logprobs["content"]]
    else:
        tops = [list(top.values()) for top in logprobs["top_logprobs"]]
        found = list(zip(logprobs["tokens"], tops, strict=True))
    return [(token, sorted(best, reverse=True)[:2]) for token, best in found if len(best) > 1]
