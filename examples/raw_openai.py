"""An agent without a framework: openai's client API, a loop, a tool. Only the import is Backhaul's.

    python examples/raw_openai.py

It starts two loopback engines, which have no model: with tools, they call the first one whenever the user has spoken. For
engines of yours: `backhaul.OpenAI(prefill=["http://..."], decode=["http://..."])`, and your model's name.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import backhaul
from backhaul_loopback import loopback_pair

SYSTEM = """You keep the log of a lighthouse. Answer in one sentence, and only from what the log says.
Wind is in knots, rain in millimetres; the log has one line for every watch, and there are four watches a day.
If the log says nothing about a question, say that it does not. Never round, never guess, never leave out the watch."""
QUESTIONS = ["How was the first watch?", "And the second?", "Which of them had more wind?"]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "read_log",
        "description": "The lines of the log about one subject.",
        "parameters": {"type": "object", "properties": {"subject": {"type": "string"}}, "required": ["subject"]},
    },
}


def read_log(subject: str) -> str:
    lines = (f"watch {watch}, {subject}: wind {12 + 7 * watch}, rain {watch * 3}, all well" for watch in range(1, 5))
    return "\n".join(lines)


def agent(client: backhaul.OpenAI, model: str) -> list[str]:
    """Asks all questions in one history; returns the answers."""
    history: list[Any] = [{"role": "system", "content": SYSTEM}]
    answers = []
    for question in QUESTIONS:
        history.append({"role": "user", "content": question})
        while True:
            reply = client.chat.completions.create(model=model, messages=history, tools=[TOOL], temperature=0)
            message: Any = reply.choices[0].message
            history.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = read_log(**json.loads(call.function.arguments))
                history.append({"role": "tool", "tool_call_id": call.id, "content": result})
        answers.append(message.content)
    return answers


def talk(prefill: str, decode: str, model: str, *, reuse: bool) -> tuple[list[str], backhaul.Conversation]:
    with (
        backhaul.OpenAI(prefill=[prefill], decode=[decode], reuse=reuse) as client,
        backhaul.conversation() as chat,
    ):
        return agent(client, model), chat


async def main() -> None:
    async with loopback_pair(connector="backhaul", prefill={"prefix_caching": False}) as pair:
        engines = (pair.prefill.url, pair.decode.url, pair.model)
        without, _ = await asyncio.to_thread(talk, *engines, reuse=False)
        answers, chat = await asyncio.to_thread(talk, *engines, reuse=True)
    for turn in chat.reuse.turns:
        print(
            f"turn {turn.turn}: {turn.route:5} pulled {turn.pulled or 0:4}  computed {turn.computed or 0:4}  {turn.reason or ''}"
        )
    print(f"{chat.reuse.total.reused} of {chat.reuse.total.prompt} prompt tokens were reused")
    print("The answers are", "those" if answers == without else "NOT those", "of the run without reuse.")


if __name__ == "__main__":
    asyncio.run(main())
