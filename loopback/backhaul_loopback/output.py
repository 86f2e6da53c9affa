"""Output processor: from steps to what a client reads: text, stop strings, tool calls (vLLM: `v1/engine/detokenizer.py`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from .bodies import Json
from .core import EngineCore
from .requests import Call
from .script import tool_call_id
from .sequence import Seq, Step
from .template import tool_call_text
from .tokenizer import Detokenizer, Special, decode


@dataclass(frozen=True)
class Delta:
    """What one step adds to a choice."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Choice:
    """One sequence as the front end sees it. A stop string ends it here, which for the core is an abort."""

    def __init__(self, call: Call, seq: Seq, index: int) -> None:
        self.call = call
        self.seq = seq
        self.index = index
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.kv_transfer_params: dict[str, Json] | None = None
        self._detokenizer = Detokenizer(skip_special_tokens=call.skip_special_tokens)
        self._shown = 0

    @property
    def cached_tokens(self) -> int:
        """P's number where the request forwards it, as vLLM's output processor prefers it."""
        told = (self.call.params or {}).get("remote_prefill_cached_tokens")
        if isinstance(told, int) and (self.call.params or {}).get("do_remote_prefill"):
            return told
        return self.seq.num_local + self.seq.num_external

    async def deltas(self, core: EngineCore) -> AsyncGenerator[Delta, None]:
        async with aclosing(core.run(self.seq)) as steps:
            async for step in steps:
                yield self._feed(step)
                if self.finish_reason is not None:
                    return

    async def finish(self, core: EngineCore) -> None:
        async with aclosing(self.deltas(core)) as deltas:
            async for _ in deltas:
                pass

    def _feed(self, step: Step) -> Delta:
        new = step.token_ids
        ended_by_token = step.finish_reason == "stop" and not self.call.include_stop
        before = len(self.text)
        self.text += self._detokenizer.feed(new[:-1] if ended_by_token else new)
        self.token_ids += new
        self.finish_reason, self.stop_reason = step.finish_reason, step.stop_reason
        self.kv_transfer_params = step.kv_transfer_params
        self._check_stop_strings(before)
        return Delta(self._take_text(), new, self.finish_reason, self.stop_reason)

    def _check_stop_strings(self, before: int) -> None:
        if len(self.token_ids) <= self.call.min_tokens:
            return
        for stop in self.call.stop:
            at = self.text.find(stop, max(0, before - len(stop) + 1)) if stop else -1
            if at >= 0:
                self.text = self.text[: at + len(stop) if self.call.include_stop else at]
                self.finish_reason, self.stop_reason = "stop", stop
                return

    def _take_text(self) -> str:
        held_back = 0
        if self.finish_reason is None and self.call.stop and not self.call.include_stop:
            held_back = max(map(len, self.call.stop)) - 1
        end = max(self._shown, len(self.text) - held_back)
        start, self._shown = self._shown, end
        return self.text[start:end]

    def tool_calls(self) -> list[dict[str, Json]]:
        """The complete tool call, if the answer is one."""
        parser = self.tool_parser()
        if parser is None:
            return []
        parser.feed(tuple(self.token_ids))
        return parser.complete()

    def tool_parser(self) -> ToolParser | None:
        tool = self.seq.script.tool
        return None if tool is None else ToolParser(str(tool["name"]), self.seq)


class ToolParser:
    """Reads the scripted tool call out of the ids, as they come."""

    def __init__(self, name: str, seq: Seq) -> None:
        self._name = name
        self._seq = seq
        self._prefix = tool_call_text(name, "")[:-1]
        self._body: list[int] = []
        self._ended = False
        self._named = False
        self._sent = 0

    def feed(self, token_ids: tuple[int, ...]) -> list[dict[str, Json]]:
        """The `tool_calls` deltas that the new ids complete."""
        for token in token_ids:
            if token == Special.TOOL_CALL_END:
                self._ended = True
            elif token < 256 and not self._ended:
                self._body.append(token)
        text = decode(self._body)
        if len(text) <= len(self._prefix):
            return []
        deltas: list[dict[str, Json]] = []
        if not self._named:
            self._named = True
            deltas.append({"id": self._id, "type": "function", "index": 0, "function": {"name": self._name}})
        arguments = text[len(self._prefix) : -1]
        if fresh := arguments[self._sent :]:
            self._sent = len(arguments)
            deltas.append({"index": 0, "function": {"arguments": fresh}})
        return deltas

    def complete(self) -> list[dict[str, Json]]:
        if not self._ended:
            return []
        arguments = decode(self._body)[len(self._prefix) : -1]
        function = {"name": self._name, "arguments": arguments}
        return [{"id": self._id, "type": "function", "function": function}]

    @property
    def _id(self) -> str:
        return tool_call_id(self._seq.seed)
