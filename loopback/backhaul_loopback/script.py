"""Fake sampler: what the engine answers is a deterministic function of the state over the KV that the request used.

Plain turns get readable words, a request with tools gets a call of the first tool, one with a JSON format gets
JSON that fits its schema.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .kv import kv_value
from .template import tool_call_text
from .tokenizer import EOS, Special, encode

Json = Any
Choose = Callable[[Sequence[str]], str]

_WORDS = """
amber anchor autumn basin beacon birch blossom branch bridge brook canyon cedar cliff clover coast copper
coral cotton creek crystal dawn delta desert drift dune ember fern field flint forest frost garden glacier
granite grove harbor hazel heather hollow island ivory jasmine juniper lagoon lantern laurel linden lotus maple
marble meadow mesa mist moss north oasis ocean olive orchard pearl pebble pine plateau prairie quartz rain reef
ridge river saffron sage shore silver slate spring spruce stone summit thicket tide timber trail tundra valley
velvet violet walnut water willow winter wren yarrow zephyr
"""
WORDS = tuple(_WORDS.split())
_SHORTEST, _SPREAD = 24, 30
_WORDS_PER_SENTENCE = 6
_LAST_WORD = max(map(len, WORDS)) + len(". .")


@dataclass(frozen=True, kw_only=True)
class Script:
    """What a request asks the answer to be."""

    tool: Mapping[str, Json] | None = None
    """The function to call, in OpenAI's shape: `name` and `parameters`."""
    schema: Mapping[str, Json] | None = None
    """A JSON schema for the answer; `{}` for any object."""

    @property
    def structured(self) -> bool:
        return self.tool is not None or self.schema is not None

    def longest(self, max_tokens: int, *, min_tokens: int, ignore_eos: bool) -> int:
        """Most tokens that an answer can have: how many blocks a request must be sure of to be admitted."""
        if self.structured:
            return min(max_tokens, len(self._structured(_longest)) + 1)
        if ignore_eos:
            return max_tokens
        return min(max_tokens, max(_SHORTEST + _SPREAD, min_tokens) + _LAST_WORD + 1)

    def tokens(self, state: int, *, min_tokens: int = 0, ignore_eos: bool = False) -> Iterator[int]:
        """The answer's ids, ending with EOS. Endless text with `ignore_eos`; structured answers always end."""
        pick = chooser(state)
        if self.structured:
            yield from self._structured(pick)
            yield EOS
            return
        length = max(_SHORTEST + state % _SPREAD, min_tokens)
        count = 0
        for word in _words(pick):
            if count >= length and not ignore_eos:
                break
            yield from word
            count += len(word)
        yield from encode(".")
        yield EOS

    def _structured(self, choose: Choose) -> list[int]:
        if self.tool is not None:
            value = _instance(self.tool.get("parameters") or {"type": "object"}, choose, self.tool.get("parameters"))
            arguments = json.dumps(value if isinstance(value, dict) else {}, ensure_ascii=False)
            body = tool_call_text(str(self.tool["name"]), arguments)
            return [Special.TOOL_CALL, *encode(body), Special.TOOL_CALL_END]
        schema = self.schema or {"type": "object", "properties": {"answer": {"type": "string"}}}
        return encode(json.dumps(_instance(schema, choose, schema), ensure_ascii=False))


def chooser(state: int) -> Choose:
    """Picks by the state; each pick moves it on."""
    counter = itertools.count()

    def choose(options: Sequence[str]) -> str:
        return options[kv_value(state, next(counter)) % len(options)]

    return choose


def tool_call_id(state: int) -> str:
    return f"chatcmpl-tool-{kv_value(state, 1):016x}{kv_value(state, 2):016x}"


def _longest(options: Sequence[str]) -> str:
    return max(options, key=lambda option: len(encode(option)))


def _words(choose: Choose) -> Iterator[list[int]]:
    """Sentences without end, each word with the separator before it; the last full stop is the caller's."""
    for index in itertools.count():
        word = choose(WORDS)
        start = index % _WORDS_PER_SENTENCE == 0
        separator = "" if index == 0 else ". " if start else " "
        yield encode(separator + (word.capitalize() if start else word))


def _instance(schema: Json, choose: Choose, root: Json, depth: int = 0) -> Json:
    """A small value that fits a JSON schema. Unknown constraints (`pattern`, `format`) are not looked at."""
    if not isinstance(schema, Mapping) or depth > 8:
        return choose(WORDS)
    if "$ref" in schema:
        return _instance(_resolve(str(schema["$ref"]), root), choose, root, depth + 1)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        options = [json.dumps(option, ensure_ascii=False) for option in schema["enum"]]
        return json.loads(choose(options))
    for union in ("anyOf", "oneOf", "allOf"):
        if schema.get(union):
            return _instance(schema[union][0], choose, root, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = next((k for k in kind if k != "null"), "null")
    match kind:
        case "object":
            fields = schema.get("properties") or {}
            wanted = schema.get("required") or list(fields)
            return {name: _instance(fields.get(name, {}), choose, root, depth + 1) for name in wanted}
        case "array":
            count = max(1, int(schema.get("minItems", 1)))
            return [_instance(schema.get("items", {}), choose, root, depth + 1) for _ in range(count)]
        case "integer" | "number":
            return _number(schema, choose)
        case "boolean":
            return choose(("true", "false")) == "true"
        case "null":
            return None
        case _:
            return choose(WORDS).ljust(int(schema.get("minLength", 0)), "s")[: schema.get("maxLength")]


def _number(schema: Mapping[str, Json], choose: Choose) -> Json:
    low = schema.get("minimum", schema.get("exclusiveMinimum", 0) + ("exclusiveMinimum" in schema))
    high = schema.get("maximum", schema.get("exclusiveMaximum", low + 10) - ("exclusiveMaximum" in schema))
    span = max(1, int(min(high - low, 9)) + 1)
    return low + int(choose([str(i) for i in range(span)]))


def _resolve(reference: str, root: Json) -> Json:
    node = root
    for part in reference.removeprefix("#/").split("/"):
        node = node.get(part.replace("~1", "/").replace("~0", "~"), {}) if isinstance(node, Mapping) else {}
    return node
