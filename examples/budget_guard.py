"""A guard for agent loops: it compacts the history when reuse collapses, and stops the loop when that keeps happening.

    python examples/budget_guard.py
    python examples/budget_guard.py --budget 2000

The agent here makes a mistake that many make: it keeps its notes in a message near the top, and rewrites them now and then.
All that follows a changed message has to be computed again. The guard sees it in the turn's report, says which message did it and
what it cost, and takes the notes to the end of a shorter history. The second time it stops the loop.

It starts two loopback engines, which have no model. For engines of yours: `backhaul.AsyncOpenAI(prefill=["http://..."],
decode=["http://..."])`, and your model's name.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass, field
from typing import Any

import backhaul
from backhaul_loopback import loopback_pair

SYSTEM = """You tidy up a code base, one file a turn. Say what you would change in it and why, in three sentences at most.
Rules: names before comments; no abbreviation that a newcomer would have to look up; a function does one thing; an error says
what was wrong, where, and what to do; a test fails for one reason. Ask when a rule and the code's own habits disagree."""
FILES = [f"{part}_{kind}.py" for part in ("billing", "search", "login", "mail") for kind in ("model", "views", "jobs")]
REWRITES_NOTES_BEFORE = (5, 10)
"""Turns."""
KEPT = 2
"""Messages that stay as they are when the history is compacted."""


class Stop(Exception):
    """The guard ends the loop; the message says why."""


@dataclass
class Guard:
    """Looks at each turn's report, and decides what becomes of the loop."""

    budget: int
    """Prompt tokens that may be computed rather than reused, all turns together."""
    allowed: int = 1
    """Collapses after which the history is compacted; the next one stops the loop."""
    seen: list[backhaul.Collapse] = field(default_factory=list)

    def wants_compaction(self, reuse: backhaul.Reuse) -> bool:
        """Raises `Stop`."""
        if reuse.total.computed > self.budget:
            raise Stop(f"{reuse.total.computed} tokens were computed, and the budget is {self.budget}")
        collapse = reuse.collapse
        if collapse is None or collapse in self.seen:
            return False
        self.seen.append(collapse)
        print(f"        guard: {collapse}; {collapse.tokens_lost} tokens lost")
        if len(self.seen) > self.allowed:
            raise Stop(f"reuse collapsed {len(self.seen)} times, the last time by message {collapse.message}")
        return True


def compacted(history: list[dict[str, Any]], notes: str) -> list[dict[str, Any]]:
    """The rules, what is known so far, and the last messages."""
    return [history[0], {"role": "user", "content": f"What we know so far: {notes}"}, *history[-KEPT:]]


async def work(client: backhaul.AsyncOpenAI, model: str, guard: Guard) -> backhaul.Conversation:
    async with backhaul.conversation(collapse_floor=64) as chat:
        notes = "nothing yet"
        history = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Notes: {notes}"}]
        try:
            for number, file in enumerate(FILES, 1):
                if number in REWRITES_NOTES_BEFORE:
                    notes = f"{number - 1} files are done, the last one was {FILES[number - 2]}"
                    history[1] = {"role": "user", "content": f"Notes: {notes}"}  # the mistake
                history.append({"role": "user", "content": f"Next: {file}, " + "a class with nine methods. " * 6})
                request: Any = {"model": model, "messages": history, "max_tokens": 48}
                answer = await client.chat.completions.create(**request)
                history.append({"role": "assistant", "content": answer.choices[0].message.content})
                show(chat.reuse.last)
                if guard.wants_compaction(chat.reuse):
                    history = compacted(history, notes)
                    print(f"        guard: the history has {len(history)} messages now")
        except Stop as stop:
            print(f"stopped: {stop}")
    return chat


def show(turn: backhaul.ReuseReport | None) -> None:
    assert turn is not None, "every turn inside a conversation leaves a report"
    print(
        f"turn {turn.turn:>2}  {turn.route:<5}  {turn.reused:>4} reused  {turn.computed:>4} computed  {turn.reason or ''}"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description="An agent loop that stops or compacts when reuse collapses.")
    parser.add_argument("--budget", type=int, default=10_000, help="tokens that may be computed")
    options = parser.parse_args()
    async with loopback_pair(connector="backhaul", prefill={"prefix_caching": False}) as pair:
        prefill, decode = [pair.prefill.url], [pair.decode.url]
        async with backhaul.AsyncOpenAI(prefill=prefill, decode=decode, local_max_tokens=0) as client:
            chat = await work(client, pair.model, Guard(options.budget))
    total = chat.reuse.total
    print(f"{total.turns} turns: {total.reused} of {total.prompt} prompt tokens were reused, {total.computed} computed")


if __name__ == "__main__":
    asyncio.run(main())
