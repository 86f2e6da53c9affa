"""Histories that are not what D ran: what agents, their frameworks and their templates change between two turns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from backhaul_router.report import Reason

from .building import Edit, edited, first, following, opening, system, user
from .model import STORY, WARM, Ask, Body, Case, Message, Past, World, cold

# --- edits of a history ---------------------------------------------------------------------------------------------------


def put(index: int, **fields: Any) -> Edit:
    return lambda history: history[index].update(fields)


def forget_answer(history: list[Message]) -> None:
    del history[2:]


def shorten(history: list[Message]) -> None:
    del history[2:]
    history[1]["content"] = f"First: {STORY}"


def compact(history: list[Message]) -> None:
    history[1:] = [user("So far we have spoken about caches. Now tell me more."), *history[-1:]]


def edits() -> Iterator[Case]:
    yield edited("the history as it was", lambda history: None)
    yield edited("a message edited in the middle", put(1, content=f"Edited: {STORY * 3}"))
    yield edited("the end of a message edited", put(1, content=f"First: {STORY * 2} But not so."))
    yield edited("a message removed", lambda history: history.pop(1))
    yield edited("a message inserted", lambda history: history.insert(1, user("Before that.")))
    yield edited("the answer rewritten", put(2, content="Something else entirely, and longer than it was."))
    yield edited("the answer's last characters trimmed", lambda h: h[2].update(content=h[2]["content"][:-7]))
    yield edited("the answer's spaces changed", lambda h: h[2].update(content=h[2]["content"].replace(" ", "  ")))
    yield edited("the last turn regenerated", forget_answer)
    yield edited("the last turn shortened", shorten)
    yield edited("the history compacted into a summary", compact)
    yield edited("another agent's history under the same id", lambda h: h.pop(0), cold(Reason.DIVERGED))


# --- reasoning, tool calls ------------------------------------------------------------------------------------------------

ARGUMENTS = {"place": "château", "level": 3, "tags": ["a", "b"]}


def with_thoughts(world: World) -> Body:
    thought = {"role": "assistant", "content": "Well, let me see.", "reasoning": f"I should look: {STORY}"}
    return first(world, messages=[*opening(world), thought, user(f"Go on. {STORY}")])


def with_call(arguments: str) -> Callable[[World], Body]:
    """A first turn whose history has a tool call in it."""

    def build(world: World) -> Body:
        function = {"name": "look", "arguments": arguments}
        call = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        }
        result = {"role": "tool", "tool_call_id": "c1", "content": f"Nothing there. {STORY}"}
        return first(world, messages=[*opening(world), call, result])

    return build


def reserialised(how: Callable[[Any], str]) -> Edit:
    def change(history: list[Message]) -> None:
        function = history[2]["tool_calls"][0]["function"]
        function["arguments"] = how(json.loads(function["arguments"]))

    return change


SPACED = json.dumps(ARGUMENTS, ensure_ascii=False)
RESERIALISED: dict[str, Callable[[Any], str]] = {
    "spacing": lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":")),
    "key order": lambda value: json.dumps(value, ensure_ascii=False, sort_keys=True),
    "unicode escapes": lambda value: json.dumps(value, ensure_ascii=True),
}


def messages_of_other_kinds() -> Iterator[Case]:
    def strip(history: list[Message]) -> None:
        del history[2]["reasoning"]

    yield edited("reasoning stripped between turns", strip, first=with_thoughts)
    for name, how in RESERIALISED.items():
        yield edited(f"tool arguments with other {name}", reserialised(how), first=with_call(SPACED))


# --- what stands before the messages --------------------------------------------------------------------------------------


def tools(world: World, *names: str) -> list[Message]:
    """The mark is in the first tool, since tools are rendered before the messages."""
    properties = {"place": {"type": "string", "enum": ["door", "window"]}}
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"{world.mark}: {STORY * 3}" if index == 0 else "Another tool.",
                "parameters": {"type": "object", "properties": properties, "required": ["place"]},
            },
        }
        for index, name in enumerate(names)
    ]


def with_clock(time: str, *, late: bool = False) -> Callable[[World], Message]:
    def build(world: World) -> Message:
        return system(f"{world.mark} {STORY * 5} It is {time}." if late else f"{time}, {world.mark} {STORY * 5}")

    return build


def clock(*, late: bool) -> Case:
    before, after = with_clock("8:05", late=late), with_clock("9:10", late=late)

    def at_first(world: World) -> Body:
        return first(world, messages=[before(world), *opening(world)[1:]])

    def at_second(past: Past) -> Body:
        return following(past, lambda history: history.__setitem__(0, after(past)))

    where = "at the end of" if late else "in front of"
    expect = WARM if late else cold(Reason.DIVERGED)
    return Case(name=f"a clock {where} the system prompt", first=at_first, then=(Ask(body=at_second, expect=expect),))


def prefaces() -> Iterator[Case]:
    yield clock(late=False)
    yield clock(late=True)

    def with_tools(world: World) -> Body:
        return first(world, tools=tools(world, "look", "go"), tool_choice="none")

    for name, expect, fields in (
        ("the tools as they were", WARM, lambda world: {"tools": tools(world, "look", "go")}),
        ("the second tool changed", WARM, lambda world: {"tools": tools(world, "look", "run")}),
        ("the second tool dropped", WARM, lambda world: {"tools": tools(world, "look")}),
        ("all tools dropped", cold(Reason.DIVERGED), lambda world: {}),
    ):
        then = Ask(body=lambda past, fields=fields: following(past, **fields(past)), expect=expect)  # type: ignore[misc]
        yield Case(name=name, first=with_tools, then=(then,))
