"""`backhaul bench retokenise`: how often a model's own answer becomes other tokens when a client sends it back as text.

A model may spell a text in tokens that its tokenizer would not choose, such as two single line breaks where one token stands for
both. From the first such place on, the KV of the answer is that of another sequence and cannot be reused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import httpx2
from backhaul_cli.options import Count
from backhaul_connector.launch.cluster import Engines

from .answers import CHAT, EngineTrouble, Json, first_of_group
from .clusters import on_vllm, say
from .options import OnVllm

QUESTIONS = (
    "Explain in two paragraphs what {} is.",
    "List three facts about it, each in a paragraph of its own, with an empty line between.",
    "Give me a numbered list of five steps by which a beginner could learn more.",
    "Write a short poem about it, in two verses.",
    "Write a small table in Markdown that compares it with something else.",
    "Thank you. Sum it up in one sentence, please.",
)
TOPICS = (
    "a cache",
    "the sea",
    "a bicycle",
    "bread",
    "the moon",
    "a Python dictionary",
    "chess",
    "photosynthesis",
    "a volcano",
    "the Roman Empire",
    "an apple tree",
    "an SQL join",
)
SYSTEM = "You are a helpful assistant."
_AROUND = 3
"""Tokens shown on either side of the first that differs."""


_CONVERSATIONS = len(TOPICS)


@dataclass(frozen=True, kw_only=True)
class Options(OnVllm):
    model: Annotated[str, "DIR_OR_NAME", "as for `up`"] = "smollm2"
    conversations: Annotated[Count, "of six turns"] = _CONVERSATIONS
    answer_tokens: Annotated[Count, "at most"] = 120


@dataclass(frozen=True)
class Difference:
    """An answer that became other tokens."""

    conversation: int
    turn: int
    at: int
    """Index of the first token of the answer that differs."""
    answer_tokens: int
    generated: str
    """What the model wrote around there, one token a piece, with `|` between."""
    resent: str
    """What the tokenizer made of the same text."""


@dataclass
class Result:
    model: str
    title: str
    answers: int = 0
    answer_tokens: int = 0
    lost_tokens: int = 0
    """Tokens of answers from the first that differs on."""
    differences: list[Difference] = field(default_factory=list)
    wall_s: float = 0.0


async def measure(urls: Sequence[str], model: str, title: str, options: Options) -> Result:
    """Asks the engines at `urls`, one conversation at a time each. Raises `EngineTrouble`."""
    result = Result(model, title)
    numbers = iter(range(options.conversations))
    begin = time.perf_counter()
    async with httpx2.AsyncClient(timeout=600.0, trust_env=False) as http:
        with first_of_group():
            async with asyncio.TaskGroup() as group:
                for url in urls:
                    group.create_task(_some(numbers, _Engine(http, url, model), options, result))
    result.wall_s = round(time.perf_counter() - begin, 1)
    result.differences.sort(key=lambda one: (one.conversation, one.turn))
    return result


@dataclass(frozen=True)
class _Engine:
    http: httpx2.AsyncClient
    url: str
    model: str

    async def post(self, path: str, body: dict[str, Json]) -> Json:
        try:
            answer = await self.http.post(self.url + path, json={"model": self.model, **body})
        except httpx2.HTTPError as error:
            raise EngineTrouble(f"{self.url} does not answer: {error!r}") from error
        if answer.status_code != 200:
            raise EngineTrouble(f"{self.url}{path} answered {answer.status_code}: {answer.text[:500]}")
        return answer.json()

    async def render(self, messages: Sequence[dict[str, Json]]) -> list[int]:
        ids: list[int] = (await self.post(f"{CHAT}/render", {"messages": list(messages)}))["token_ids"]
        return ids

    async def pieces(self, ids: Sequence[int]) -> str:
        """Each token's own text."""
        texts = [(await self.post("/detokenize", {"tokens": [one]}))["prompt"] for one in ids]
        return "|".join(repr(text)[1:-1] for text in texts)


async def _some(numbers: Any, engine: _Engine, options: Options, result: Result) -> None:
    for number in numbers:
        topic = TOPICS[number % len(TOPICS)]
        messages: list[dict[str, Json]] = [{"role": "system", "content": SYSTEM}]
        for turn, question in enumerate(QUESTIONS):
            messages.append({"role": "user", "content": question.format(topic)})
            await _turn(engine, messages, number, turn, options, result)


async def _turn(
    engine: _Engine, messages: list[dict[str, Json]], number: int, turn: int, options: Options, result: Result
) -> None:
    """Asks, puts the answer into the history, and compares what was run with what would be run for the history."""
    # Conversations beyond the first dozen have known topics; a temperature and a seed make their answers others.
    sampling = {"temperature": 0.7 if number >= len(TOPICS) else 0, "seed": number}
    body = {"messages": messages, "max_tokens": options.answer_tokens, "return_token_ids": True, **sampling}
    answer = await engine.post(CHAT, body)
    choice, prompt = answer["choices"][0], answer["prompt_token_ids"]
    generated: list[int] = choice["token_ids"]
    messages.append({"role": "assistant", "content": choice["message"]["content"] or ""})
    resent = (await engine.render(messages))[len(prompt) :]
    count = len(generated) - 1  # the last token's KV is not computed
    same = next((i for i in range(count) if generated[i] != (resent[i] if i < len(resent) else None)), count)
    result.answers += 1
    result.answer_tokens += count
    if same < count:
        result.lost_tokens += count - same
        window = slice(max(0, same - _AROUND), same + _AROUND + 1)
        texts = [await engine.pieces(ids[window]) for ids in (generated, resent)]
        result.differences.append(Difference(number, turn, same, count, *texts))


def main(options: Options) -> int:
    """Measures on vLLM engines that it starts and ends, and prints. Raises `LaunchError`."""
    found, config = on_vllm(options.model, options.python)
    with Engines(config, report=say) as engines:
        urls = [engine.url for engine in engines.all]
        title = f"vLLM {found.vllm}, model {engines.model}"
        result = asyncio.run(measure(urls, engines.model, title, options))
    for line in lines(result):
        print(line)
    options.write(asdict(result))
    return 0


def lines(result: Result) -> list[str]:
    """For people."""
    differ, lost = len(result.differences), result.lost_tokens
    return [
        f"{result.title}: {result.answers} answers of {result.answer_tokens:,} tokens in {result.wall_s:,.0f} s",
        f"{differ} ({_share(differ, result.answers)}) become other tokens when they are sent back; "
        f"{lost:,} tokens ({_share(lost, result.answer_tokens)}) come after the first that differs",
        *(
            f"  conversation {one.conversation} turn {one.turn}, token {one.at} of {one.answer_tokens}: "
            f"{one.generated}  ->  {one.resent}"
            for one in result.differences
        ),
    ]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"
