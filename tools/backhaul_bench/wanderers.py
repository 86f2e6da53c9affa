"""Random walks: agents that change their histories at random between turns, as frameworks, users and bugs do."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

Message = dict[str, Any]
Body = dict[str, Any]

_TEXT = """
amber beacon canyon delta ember fern granite harbor island jasmine kettle lantern meadow north orchard pebble quartz
river saffron thicket umber valley willow xylem yarrow zephyr Straße 東京 naïve 🌊 don't {x} <tag>
"""
_WORDS = _TEXT.split()
_SYSTEM_PROMPTS = 5
"""Few, so that conversations share prefixes: a poisoned prefix cache of one then shows in the answers of others."""


class Wanderer:
    """One conversation. The same seed makes the same requests, as long as it is given the same answers."""

    def __init__(self, seed: int, index: int, *, longest_answer: int) -> None:
        self.name = f"{seed}-{index}"
        self._rng = random.Random(f"{seed} {index}")
        self._longest_answer = longest_answer
        self._system = self._rng.randrange(_SYSTEM_PROMPTS)
        self._tools = 0
        self._salt: str | None = None
        self.history: list[Message] = [_system(self._system)]
        self.turns = self._rng.randrange(2, 7)
        self.change = "begins"
        """What was done to the history before the last request, in words."""

    def next(self) -> Body:
        """Changes the history, and asks."""
        names = list(_CHANGES)
        weights = [weight for weight, _ in _CHANGES.values()]
        if len(self.history) == 1:
            self._ask()
        else:
            (self.change,) = self._rng.choices(names, weights)
            _CHANGES[self.change][1](self)
            if self.history[-1]["role"] != "user":
                self._ask()
        return self._body()

    def heard(self, message: Message) -> None:
        """The answer of the last request goes into the history."""
        self.history.append(message)

    def chance(self, share: float) -> bool:
        return self._rng.random() < share

    # --- what is asked

    def _ask(self) -> None:
        self.history.append({"role": "user", "content": self._text()})

    def _body(self) -> Body:
        rng = self._rng
        body: Body = {
            "messages": [dict(message) for message in self.history],
            "temperature": 0,
            "max_tokens": rng.choice([1, rng.randrange(2, self._longest_answer), self._longest_answer]),
            "stream": rng.random() < 0.5,
        }
        if self._tools:
            body |= {
                "tools": [_tool(number) for number in range(self._tools)],
                "tool_choice": rng.choice(["auto", "none"]),
            }
        if self._salt is not None:
            body["cache_salt"] = self._salt
        if rng.random() < 0.15:
            body |= rng.choice(_ODD)
        return body

    def _text(self) -> str:
        return " ".join(self._rng.choices(_WORDS, k=self._rng.choice([2, 8, 30, 80])))

    # --- what is changed

    def _any(self) -> int:
        return self._rng.randrange(len(self.history))

    def _extend(self) -> None:
        self._ask()

    def _edit(self) -> None:
        message = self.history[self._any()]
        old = message.get("content") or ""
        at = self._rng.randrange(len(old) + 1)
        message["content"] = old[:at] + self._text() + old[at + self._rng.randrange(9) :]

    def _remove(self) -> None:
        del self.history[self._any()]

    def _insert(self) -> None:
        self.history.insert(self._any(), {"role": "user", "content": self._text()})

    def _regenerate(self) -> None:
        while self.history and self.history[-1]["role"] != "user":
            self.history.pop()

    def _go_back(self) -> None:
        del self.history[max(1, self._any()) :]

    def _repeat(self) -> None:
        """The same request again, its answer thrown away."""
        if len(self.history) > 1 and self.history[-1]["role"] == "assistant":
            self.history.pop()

    def _compact(self) -> None:
        self.history[1:] = [{"role": "user", "content": f"Until now: {self._text()}"}]

    def _tell_time(self) -> None:
        clock = f"It is {self._rng.randrange(24)}:{self._rng.randrange(60):02}. "
        self.history[0] = {"role": "system", "content": clock + _system(self._system)["content"]}

    def _respace(self) -> None:
        message = self.history[self._any()]
        message["content"] = " ".join((message.get("content") or "").split())

    def _think(self) -> None:
        for message in self.history:
            if message["role"] == "assistant":
                message["reasoning"] = self._text()

    def _stop_thinking(self) -> None:
        for message in self.history:
            message.pop("reasoning", None)

    def _call(self) -> None:
        """A tool call and its result, which the agent made up."""
        arguments = json.dumps({"query": self._text(), "limit": self._rng.randrange(99)}, ensure_ascii=False)
        call = {"id": "call-1", "type": "function", "function": {"name": "search0", "arguments": arguments}}
        self.history += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call-1", "content": self._text()},
        ]

    def _reserialise(self) -> None:
        options: list[dict[str, Any]] = [{"ensure_ascii": True}, {"separators": (",", ":")}, {"sort_keys": True}]
        for message in self.history:
            for call in message.get("tool_calls") or ():
                try:
                    arguments = json.loads(call["function"]["arguments"])
                except ValueError:
                    continue  # an answer that was cut short
                how = self._rng.choice(options)
                call["function"] = {**call["function"], "arguments": json.dumps(arguments, **how)}

    def _change_tools(self) -> None:
        self._tools = self._rng.randrange(4)

    def _change_salt(self) -> None:
        self._salt = self._rng.choice([None, "a", "b"])


_CHANGES: Mapping[str, tuple[int, Callable[[Wanderer], None]]] = {
    "extends": (30, Wanderer._extend),
    "edits a message": (6, Wanderer._edit),
    "removes a message": (3, Wanderer._remove),
    "inserts a message": (3, Wanderer._insert),
    "regenerates": (4, Wanderer._regenerate),
    "repeats": (4, Wanderer._repeat),
    "goes back": (4, Wanderer._go_back),
    "compacts": (2, Wanderer._compact),
    "tells the time": (2, Wanderer._tell_time),
    "changes spaces": (3, Wanderer._respace),
    "adds reasoning": (2, Wanderer._think),
    "strips reasoning": (2, Wanderer._stop_thinking),
    "calls a tool": (4, Wanderer._call),
    "writes arguments anew": (3, Wanderer._reserialise),
    "changes its tools": (2, Wanderer._change_tools),
    "changes the salt": (1, Wanderer._change_salt),
}
"""How often, and how."""

_ODD: tuple[Body, ...] = (
    {"n": 2, "temperature": 0.7, "seed": 3},
    {"stop": ["e"]},
    {"stop_token_ids": [46, 101, *range(300, 4000, 90)]},
    {"ignore_eos": True},
    {"documents": [{"title": "Doors", "text": "Doors open."}]},
    {"reasoning_effort": "low"},
    {"logprobs": True},
    {"return_token_ids": True},
    {"min_tokens": 1},
)


def _system(number: int) -> Message:
    rng = random.Random(number)
    return {"role": "system", "content": f"You are agent {number}. {' '.join(rng.choices(_WORDS, k=10 + 20 * number))}"}


def _tool(number: int) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    return {"type": "function", "function": {"name": f"search{number}", "parameters": parameters}}
