"""Request schemas: the fields that vLLM 0.32's endpoints know, and their types (pydantic there). Unknown ones are ignored."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from .errors import ApiError

Json = Any
T = TypeVar("T")


class GenerationBody(msgspec.Struct, kw_only=True):
    """What both generation endpoints take."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = 0
    n: int | None = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stream: bool | None = False
    stream_options: dict[str, Json] | None = None
    response_format: dict[str, Json] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    use_beam_search: bool = False
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: dict[str, Json] | None = None
    vllm_xargs: dict[str, Json] | None = None


class ChatBody(GenerationBody):
    messages: list[dict[str, Json]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Json]] | None = None
    tool_choice: str | dict[str, Json] | None = None
    parallel_tool_calls: bool | None = True
    documents: list[dict[str, Json]] | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Json] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: bool = False
    logprobs: bool | None = False
    top_logprobs: int | None = 0


class CompletionBody(GenerationBody):
    prompt: str | list[str | int | list[int]] | None = None
    max_tokens: int | None = 16
    add_special_tokens: bool = True
    echo: bool | None = False
    suffix: str | None = None
    logprobs: int | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`/tokenize` of 0.32: no documents, reasoning effort, truncation or tool choice; `reasoning_content` is not
    renamed. Requests that use those come out shorter than what the chat endpoint runs."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Json]] | None = None
    tools: list[dict[str, Json]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Json] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


def convert(body: Json, type_: type[T]) -> T:
    if not isinstance(body, dict):
        raise ApiError.invalid("Input should be a valid dictionary", param="body")
    try:
        return msgspec.convert(body, type_)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        raise ApiError.invalid(message, param=f"body{where.rstrip('`')}" if where else "body") from error
