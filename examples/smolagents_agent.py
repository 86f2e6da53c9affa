"""smolagents: a tool-calling agent that keeps its memory, and turns that read their history's KV back.

    pip install 'smolagents[openai]'
    python examples/smolagents_agent.py

It starts two loopback engines, which have no model: they call the first tool, or the one that they are told to. For
engines of yours: `backhaul.OpenAI(prefill=["http://..."], decode=["http://..."])`, your model's name, and smolagents' own
`OpenAIModel`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import backhaul
from backhaul_loopback import loopback_pair
from smolagents import ChatMessage, LogLevel, MessageRole, OpenAIModel, Tool, ToolCallingAgent

QUESTIONS = ["What is on shelf 3?", "Is there anything on it that must be kept cool?", "Which parcel came last?"]


class Shelf(Tool):
    name = "shelf"
    description = "Lists the parcels on a shelf."
    inputs = {"number": {"type": "string", "description": "The number of the shelf."}}  # noqa: RUF012
    output_type = "string"

    def forward(self, number: str) -> str:
        return "\n".join(f"shelf {number}: parcel {731 * n % 97}, {n * 3} kg, came at {7 + n}:15" for n in range(1, 5))


class AnswersAfterATool(OpenAIModel):
    """A real model knows when to answer. An engine without one calls its first tool until it is told otherwise."""

    def generate(self, messages: list[Any], *args: Any, **options: Any) -> ChatMessage:
        done = messages[-1].role == MessageRole.TOOL_RESPONSE
        choice = {"type": "function", "function": {"name": "final_answer"}} if done else "required"
        return super().generate(messages, *args, tool_choice=choice, **options)


def converse(client: backhaul.OpenAI, model: str) -> list[str]:
    agent = ToolCallingAgent(
        tools=[Shelf()], model=AnswersAfterATool(model, client=client), verbosity_level=LogLevel.OFF
    )
    return [str(agent.run(question, reset=False)) for question in QUESTIONS]


def talk(prefill: str, decode: str, model: str, *, reuse: bool) -> tuple[list[str], backhaul.Conversation]:
    with (
        backhaul.OpenAI(prefill=[prefill], decode=[decode], reuse=reuse) as client,
        backhaul.conversation() as chat,
    ):
        return converse(client, model), chat


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
