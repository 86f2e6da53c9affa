"""What most cases begin with: a first turn with a long answer, and the turn after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .model import STORY, WARM, Ask, Body, Case, Expect, Message, Past, World

Edit = Callable[[list[Message]], Any]
Build = Callable[[Past], Body]


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def opening(world: World) -> list[Message]:
    return [system(f"{world.mark} {STORY * 5}"), user(f"First: {STORY * 3}")]


def first(world: World, **fields: Any) -> Body:
    """A first turn whose answer is long, and as long on every engine."""
    asked = {"messages": opening(world), "max_tokens": world.answer, "ignore_eos": True, "return_token_ids": True}
    return {**asked, **fields}


def again(past: Past) -> Body:
    return dict(past.last.body)


def following(past: Past, edit: Edit | None = None, **fields: Any) -> Body:
    """The next turn of a conversation, whose history someone may have edited."""
    history = past.history()
    if edit is not None:
        edit(history)
    return {"messages": history, "max_tokens": 12, "return_token_ids": True, **fields}


def extended(**fields: Any) -> Build:
    return lambda past: following(past, **fields)


def edited(name: str, edit: Edit, expect: Expect = WARM, **more: Any) -> Case:
    """A case in which the second turn's history is not what the first turn left."""
    given: dict[str, Any] = {"first": first, **more}
    return Case(name=name, then=(Ask(body=lambda past: following(past, edit), expect=expect),), **given)
