"""Chat template: which tokens a conversation becomes.

Every field that a real template may look at shows up in the tokens, so that a router that overlooks one
is caught. An assistant turn is written exactly as the model generated it (see `script`), so a history
that the client sends back unchanged is a strict extension of what the engine ran.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import ApiError
from .tokenizer import Special, encode

Json = Any

_PER_CALL = ("add_generation_prompt", "continue_final_message", "documents", "tools")


@dataclass
class Prompt:
    """A prompt's tokens, and what some positions hold besides their id: an image's content, by position."""

    tokens: list[int]
    features: dict[int, int] = field(default_factory=dict)

    def keys(self) -> list[int]:
        """Per position, what its KV is computed from: the id, and for an image's placeholder the image."""
        if not self.features:
            return self.tokens
        return [token | self.features.get(i, 0) << 16 for i, token in enumerate(self.tokens)]


@dataclass(frozen=True, kw_only=True)
class ChatFields:
    """What the template sees of a request. `/tokenize` fills in fewer of these than the chat endpoint does."""

    messages: Sequence[Mapping[str, Json]]
    tools: Sequence[Json] | None = None
    documents: Sequence[Json] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Mapping[str, Json] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def options(self) -> dict[str, Json]:
        """The variables that a template is given, as vLLM merges them (`build_chat_params`)."""
        given = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            given.setdefault("enable_thinking", self.reasoning_effort != "none")
            given["reasoning_effort"] = self.reasoning_effort
        return {name: value for name, value in sorted(given.items()) if name not in _PER_CALL}


def render(chat: ChatFields) -> Prompt:
    prompt = Prompt([Special.BOS])
    out = prompt.tokens
    if options := chat.options():
        out += [Special.OPTIONS, *encode(_dump(options)), Special.END]
    if chat.tools:
        out.append(Special.TOOLS)
        for tool in chat.tools:
            out += encode(_dump(tool) + "\n")
        out.append(Special.END)
    for document in chat.documents or ():
        out += [Special.DOCUMENT, *encode(_dump(document)), Special.END]
    last = len(chat.messages) - 1
    for index, message in enumerate(chat.messages):
        _turn(prompt, index, message)
        if not (chat.continue_final_message and index == last):
            out += [Special.END, *encode("\n")]
    if chat.add_generation_prompt and not chat.continue_final_message:
        out += [Special.TURN, *encode("assistant\n")]
    return prompt


def has_media(messages: Sequence[Mapping[str, Json]]) -> bool:
    """Whether any message has a part that is not text: forwarded token ids are ignored for such requests."""
    return any(
        isinstance(message.get("content"), list)
        and any(not isinstance(part, str) and part.get("type", "text") != "text" for part in message["content"])
        for message in messages
    )


def tool_call_text(name: str, arguments: str) -> str:
    """What stands between the two tool call tokens. `arguments` is JSON, kept as it was written."""
    return f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'


def _turn(prompt: Prompt, index: int, message: Mapping[str, Json]) -> None:
    out = prompt.tokens
    role = message.get("role")
    if not isinstance(role, str):
        raise ApiError.invalid("Field required", param=f"body.messages.{index}.role")
    names = [str(message[key]) for key in ("name", "tool_call_id") if message.get(key)]
    out += [Special.TURN, *encode(":".join([role, *names]) + "\n")]
    if reasoning := message.get("reasoning"):
        out += [Special.THINK, *encode(str(reasoning)), Special.THINK_END]
    _content(prompt, index, message.get("content"))
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments") or "{}"
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        body = tool_call_text(str(function.get("name")), text)
        out += [Special.TOOL_CALL, *encode(body), Special.TOOL_CALL_END]


def _content(prompt: Prompt, index: int, content: Json) -> None:
    if content is None:
        return
    if isinstance(content, str):
        prompt.tokens += encode(content)
        return
    if not isinstance(content, list):
        raise ApiError.invalid("Input should be a string or a list of parts", param=f"body.messages.{index}.content")
    wrote_text = False
    for part in content:
        kind = "text" if isinstance(part, str) else part.get("type", "text")
        if kind in ("text", "input_text", "output_text", "refusal"):
            text = part if isinstance(part, str) else str(part.get("text", part.get("refusal", "")))
            prompt.tokens += encode("\n" + text if wrote_text else text)
            wrote_text = True
        elif kind in ("image_url", "image", "input_image"):
            digest = hashlib.blake2b(_dump(part).encode(), digest_size=4).digest()
            prompt.features[len(prompt.tokens)] = int.from_bytes(digest, "little")
            prompt.tokens.append(Special.IMAGE)
        else:
            raise ApiError.bad_request(f"Unknown part type: {kind}")


def _dump(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)
