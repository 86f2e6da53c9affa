"""A tool-using agent on a vLLM prefill/decode cluster, with a line a turn that says what was reused.

    python examples/agent.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --model NAME
    python examples/agent.py --base-url http://127.0.0.1:8000/v1 --model NAME    # a router that `backhaul serve` runs

It answers questions about the files of a folder. With --tools it offers its tools to the model, whose server must parse
tool calls; a model that calls none gets the result of the tool that the plan names, so any model will do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import backhaul

SYSTEM = """You help people to find their way in a folder of files.
Rules:
1. Answer in one or two short sentences, from the tools' results only. Never guess what a file holds.
2. Name files exactly as the tools do, with their endings, and say where in the folder they lie.
3. Numbers are whole unless a tool gave you a fraction; then give two digits after the point.
4. When a tool fails, say what failed and which tool could help instead. Do not apologise.
5. If someone asks for something that is not in the folder, say so, and say what is.
6. The folder belongs to a software project: README.md says what it is, CHANGELOG.md what is new in it,
   pyproject.toml how it is built, Makefile what a developer can run, LICENSE what others may do with it."""
FOLDER = Path(__file__).resolve().parent.parent
PLAN = [
    ("Which files are in this folder?", "list_files", {}),
    ("What is this project about?", "read_file", {"name": "README.md"}),
    ("How many words does README.md have?", "count_words", {"name": "README.md"}),
    ("At 200 words a minute, how many minutes does that take to read?", "divide", {"a": 1000, "b": 200}),
]


def list_files() -> str:
    """List the names of all files."""
    return "\n".join(sorted(path.name for path in FOLDER.iterdir() if path.is_file()))


def read_file(name: str) -> str:
    """Read the beginning of one file."""
    path = FOLDER / Path(name).name
    return path.read_text(errors="replace")[:1200] if path.is_file() else f"there is no file {name}"


def count_words(name: str) -> str:
    """Count the words of one file."""
    path = FOLDER / Path(name).name
    return str(len(path.read_text(errors="replace").split())) if path.is_file() else f"there is no file {name}"


def divide(a: float, b: float) -> str:
    """Divide a by b."""
    return f"{a / b:.2f}" if b else "b must not be 0"


TOOLS = {tool.__name__: tool for tool in (list_files, read_file, count_words, divide)}
ARGUMENTS: dict[str, dict[str, str]] = {
    "list_files": {},
    "read_file": {"type": "object", "properties": {"name": {"type": "string"}}},
    "count_words": {"name": "string"},
    "divide": {"a": "number", "b": "number"},
}


def definition(name: str) -> dict[str, Any]:
    """What the model is told of a tool."""
    parameters = {
        "type": "object",
        "properties": {argument: {"type": kind} for argument, kind in ARGUMENTS[name].items()},
        "required": list(ARGUMENTS[name]),
        "additionalProperties": False,
    }
    function = {"name": name, "description": TOOLS[name].__doc__, "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


def use(name: str, arguments: str) -> str:
    """Runs a tool. What goes wrong is told to the model, which can try again."""
    try:
        return TOOLS[name](**json.loads(arguments))
    except (KeyError, TypeError, ValueError) as error:
        return f"{name} failed: {error!r}"


def client_for(options: argparse.Namespace) -> backhaul.AsyncOpenAI:
    """With the router inside this process, or with one that is a server: all else is the same."""
    if options.base_url:
        return backhaul.AsyncOpenAI(base_url=options.base_url, api_key="none")
    return backhaul.AsyncOpenAI(prefill=options.prefill, decode=options.decode)


async def run(options: argparse.Namespace) -> backhaul.ReuseTotal:
    request: dict[str, Any] = {"model": options.model, "max_tokens": options.max_tokens, "temperature": 0}
    if options.tools:
        request["tools"] = [definition(name) for name in TOOLS]
    history: list[Any] = [{"role": "system", "content": options.system}]

    async with client_for(options) as client, backhaul.conversation() as chat:

        async def turn() -> Any:
            """Asks the model, and puts its answer into the history."""
            if options.stream:
                async with client.chat.completions.stream(messages=history, **request) as stream:
                    async for _ in stream:
                        pass
                    completion: Any = stream.current_completion_snapshot
            else:
                completion = await client.chat.completions.create(messages=history, **request)
            message = completion.choices[0].message
            history.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
            show(chat.reuse.last)
            return message

        print("turn  prompt  route  offered  cached  computed  TTFT ms  reason")
        for question, tool, arguments in PLAN:
            history.append({"role": "user", "content": question})
            message = await turn()
            for call in message.tool_calls or []:
                result = use(call.function.name, call.function.arguments)
                history.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                result = use(tool, json.dumps(arguments))
                history.append({"role": "user", "content": f"{tool} says:\n{result}\nSo, what is the answer?"})
            await turn()

    total = chat.reuse.total
    print(f"{total.turns} turns: {total.reused} of {total.prompt} prompt tokens were reused")
    return total


def show(report: backhaul.ReuseReport | None) -> None:
    """Prints what one turn reused; `-` where the engines do not say."""
    assert report is not None, "every turn inside a conversation leaves a report"
    known = {name: "-" if value is None else value for name, value in report.to_dict().items()}
    ttft = "-" if report.first_byte_ms is None else f"{report.first_byte_ms:.1f}"
    line = "{turn:>4}  {prompt:>6}  {route:>5}  {offered:>7}  {cached:>6}  {computed:>8}  {ttft:>7}  {reason}"
    print(line.format(**known, ttft=ttft))


def main() -> None:
    parser = argparse.ArgumentParser(description="A tool-using agent that shows what each turn reused.")
    parser.add_argument("--prefill", action="append", metavar="URL", help="repeat for several engines")
    parser.add_argument("--decode", action="append", metavar="URL", help="repeat for several engines")
    parser.add_argument("--base-url", metavar="URL", help="of a router, in the place of engines; ends with /v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--system", default=SYSTEM)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--tools", action="store_true", help="offer the tools to the model")
    options = parser.parse_args()
    if bool(options.base_url) == bool(options.prefill or options.decode):
        parser.error("name either --prefill and --decode engines, or a router's --base-url")
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
