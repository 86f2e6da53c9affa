"""`backhaul bench exact-histories`: what `exact_histories` gains an agent whose framework writes tool calls anew.

A small chat model calls a tool, reads its result and answers, several times in a conversation. Its tool calls come back as most
frameworks send them, parsed and written again, and the chat template writes them in its own way; its answers come back as text.
The same conversations run twice on the same engines, with the setting off and on.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from backhaul_cli.options import Count
from backhaul_connector.launch.command import Connector
from backhaul_router.config import RouterConfig
from backhaul_router.drive.router import Request, Router
from backhaul_router.report import ReuseReport, Route

from . import clusters
from .answers import CHAT, EngineTrouble
from .options import MovesKv, OnVllm

PLACES = ("Zürich", "Lisbon", "Oslo", "Cairo", "Lima", "Kyoto", "Perth", "Toronto")
QUESTIONS = (
    "What is the weather like in {} today?",
    "And tomorrow?",
    "How warm will it be at the weekend?",
    "Do I need an umbrella there next week?",
)
SYSTEM = (
    "You are a helpful assistant with one tool, which knows the weather. Call it before you answer, and then answer in one short "
    "sentence. Mention only what the tool says, do not guess, and keep the units that it uses."
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a place on a day.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "maxLength": 24}, "day": {"type": "string", "maxLength": 16}},
            "required": ["place", "day"],
            "additionalProperties": False,
        },
    },
}
# SmolLM2's own template leaves tools and tool calls out.
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] or '' }}
{%- if loop.first and tools %}

Tools:
{%- for tool in tools %}
{{ tool['function'] | tojson }}
{%- endfor %}
{%- endif %}
{%- for call in message['tool_calls'] or [] %}
<tool_call>
{"name": "{{ call['function']['name'] }}", "arguments": {{ call['function']['arguments'] | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
_CALL_TOKENS, _ANSWER_TOKENS = 96, 64

Message = dict[str, Any]


_CONVERSATIONS = len(PLACES)


@dataclass(frozen=True, kw_only=True)
class Options(OnVllm):
    model: Annotated[str, "DIR_OR_NAME", "as for `up`"] = "smollm2"
    conversations: Annotated[Count, "of eight turns"] = _CONVERSATIONS
    connector: MovesKv = Connector.BACKHAUL


@dataclass
class Mode:
    """What came of the conversations with the setting off, or on. Tokens."""

    exact: bool
    turns: int = 0
    prompt: int = 0
    reused: int = 0
    continued: int = 0
    """Turns in which the engine's own tokens took the place of other ones."""
    routes: Counter[str] = field(default_factory=Counter)

    def count(self, report: ReuseReport) -> None:
        self.turns += 1
        self.prompt += report.prompt or 0
        self.reused += report.reused
        self.continued += bool(report.exact_history)
        self.routes[str(report.route)] += 1

    @property
    def computed(self) -> int:
        return self.prompt - self.reused

    def row(self) -> dict[str, object]:
        """For `--json`."""
        return {**vars(self), "routes": dict(self.routes), "computed": self.computed}


async def measure(cluster: clusters.Cluster, conversations: int) -> list[Mode]:
    """Off and on, conversation by conversation in turn. Raises `EngineTrouble`."""
    modes = [Mode(exact) for exact in (False, True)]
    for number in range(conversations):
        for mode in modes if number % 2 == 0 else reversed(modes):
            config = RouterConfig(prefill=(cluster.prefill,), decode=(cluster.decode,), exact_histories=mode.exact)
            router = Router(config, on_report=mode.count)
            try:
                await _converse(router, cluster.model, number)
            finally:
                await router.aclose()
    return modes


async def _converse(router: Router, model: str, number: int) -> None:
    place = PLACES[number % len(PLACES)]
    history: list[Message] = [{"role": "system", "content": SYSTEM}]
    for day, question in enumerate(QUESTIONS):
        history.append({"role": "user", "content": question.format(place)})
        for forced, limit in ((True, _CALL_TOKENS), (False, _ANSWER_TOKENS)):
            # The salt keeps the two modes' conversations out of each other's caches.
            body = {
                "model": model,
                "messages": history,
                "tools": [TOOL],
                "tool_choice": "required" if forced else "auto",
                "max_tokens": limit,
                "temperature": 0,
                "cache_salt": f"{id(router)}-{number}",
            }
            answer = await _ask(router, body, f"{number}-{id(router)}")
            history.append(_sent_back(answer))
            history += [
                {"role": "tool", "tool_call_id": call["id"], "content": _result(place, day)}
                for call in answer.get("tool_calls") or ()
            ]


async def _ask(router: Router, body: dict[str, Any], conversation: str) -> Message:
    headers = [("content-type", "application/json"), ("x-conversation-id", conversation)]
    reply = await router.handle(Request("POST", CHAT, headers, json.dumps(body).encode()))
    raw = b"".join([chunk async for chunk in reply])
    if reply.status != 200:
        raise EngineTrouble(f"{CHAT} answered {reply.status}: {raw[:500].decode(errors='replace')}")
    message: Message = json.loads(raw)["choices"][0]["message"]
    return message


def _sent_back(answer: Message) -> Message:
    """As most frameworks keep it: without reasoning, its tool calls' arguments parsed and written again."""
    sent: Message = {"role": "assistant", "content": answer.get("content") or ""}
    if calls := answer.get("tool_calls"):
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _rewritten(call["function"]["arguments"])}}
            for call in calls
        ]
    return sent


def _rewritten(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), separators=(",", ":"))
    except ValueError:
        return arguments


def _result(place: str, day: int) -> str:
    hours = itertools.islice(itertools.cycle((11, 14, 17, 15, 12)), day, day + 8)
    forecast = [
        {"hour": 3 * at, "celsius": celsius, "sky": "clear" if celsius > 12 else "rain"}
        for at, celsius in enumerate(hours)
    ]
    return json.dumps({"place": place, "day": day, "forecast": forecast}, ensure_ascii=False)


def main(options: Options) -> int:
    """Measures on vLLM engines that it starts and ends, and prints. Raises `LaunchError`."""
    with tempfile.TemporaryDirectory(prefix="backhaul-") as folder:
        template = Path(folder) / "tools.jinja"
        template.write_text(TEMPLATE)
        flags = ("--chat-template", str(template), "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
        with clusters.vllm(
            options.model, python=options.python, connector=options.connector, vllm_args=flags, report=clusters.say
        ) as cluster:
            modes = asyncio.run(measure(cluster, options.conversations))
            title = cluster.title
    for line in lines(title, options.conversations, modes):
        print(line)
    options.write({"title": title, "modes": [mode.row() for mode in modes]})
    return 0


def lines(title: str, conversations: int, modes: Sequence[Mode]) -> list[str]:
    """For people."""
    head = f"{'exact histories':<16}{'turns':>6}{'prompt':>9}{'reused':>9}{'computed':>10}{'continued':>11}"
    rows = [
        f"{'on' if mode.exact else 'off':<16}{mode.turns:>6}{mode.prompt:>9,}{mode.reused:>9,}{mode.computed:>10,}"
        f"{mode.continued:>11}   "
        + ", ".join(f"{mode.routes[str(route)]} {route}" for route in Route if mode.routes[str(route)])
        for mode in modes
    ]
    return [f"{title}: {conversations} conversations of {2 * len(QUESTIONS)} turns", head, *rows]
