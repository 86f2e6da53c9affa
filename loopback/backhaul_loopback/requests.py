"""Request validation: what a request asks of the engine, and which requests vLLM 0.32 refuses."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .bodies import ChatBody, CompletionBody, GenerationBody, Json, TokenizeBody
from .errors import ApiError
from .script import Script
from .template import ChatFields, Prompt, has_media, render
from .tokenizer import VOCAB_SIZE, Special, encode


@dataclass(frozen=True, kw_only=True)
class Call:
    """One generation request, understood: what the engine core and the response writers need."""

    chat: bool
    id: str
    """Base of the response's id and of the engine's request ids."""
    model: str
    prompts: list[Prompt]
    script: Script
    max_tokens: list[int]
    """Per prompt."""
    min_tokens: int
    n: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    include_stop: bool
    ignore_eos: bool
    skip_special_tokens: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    logprobs: int | None
    """How many alternatives to show per token; `None` for no logprobs at all."""
    echo: bool
    return_token_ids: bool
    named_tool: bool
    required_tool: bool
    salt: str
    params: dict[str, Json] | None
    """`kv_transfer_params` as the engine core gets them, `prompt_token_ids` taken out; `None` when there were none."""
    sampling: dict[str, Json] = field(default_factory=dict)

    @property
    def carries_params(self) -> bool:
        """The request had a `kv_transfer_params` object, be it empty by now."""
        return self.params is not None


def chat_call(body: ChatBody, *, request_id: str | None, max_model_len: int, model: str) -> Call:
    _check_common(body)
    _check_tools(body)
    params, ids = _take_prompt_ids(body)
    prompt = Prompt(ids) if ids is not None else _truncated(render_chat(body), body, max_model_len)
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    choice = body.tool_choice
    return Call(
        chat=True,
        model=model,
        prompts=[prompt],
        script=chat_script(body),
        max_tokens=[_max_tokens(prompt, limit, body.min_tokens or 0, max_model_len)],
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        echo=body.echo,
        named_tool=isinstance(choice, dict),
        required_tool=choice == "required",
        params=params,
        **_common(body, request_id),
    )


def completion_call(body: CompletionBody, *, request_id: str | None, max_model_len: int, model: str) -> Call:
    _check_common(body)
    prompts = [_truncated(prompt, body, max_model_len) for prompt in completion_prompts(body)]
    limit = 1 if body.echo and body.max_tokens == 0 else body.max_tokens
    return Call(
        chat=False,
        model=model,
        prompts=prompts,
        script=Script(schema=_schema(body.response_format)),
        max_tokens=[_max_tokens(prompt, limit, body.min_tokens or 0, max_model_len) for prompt in prompts],
        logprobs=body.logprobs,
        echo=bool(body.echo),
        named_tool=False,
        required_tool=False,
        params=_params(body),
        **_common(body, request_id),
    )


def render_chat(body: ChatBody) -> Prompt:
    if body.chat_template is not None:
        raise _untrusted_template()
    fields = ChatFields(
        messages=[_with_reasoning(message) for message in body.messages],
        tools=body.tools,
        documents=body.documents,
        reasoning_effort=body.reasoning_effort,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    return render(fields)


def completion_prompts(body: CompletionBody) -> list[Prompt]:
    prompt = body.prompt
    if not prompt:
        raise ApiError.bad_request("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    many: list[Json] = list(prompt) if isinstance(prompt, list) else [prompt]
    kinds = {type(item) for item in many}
    if len(kinds) > 1:
        raise ApiError.invalid("Input should be a list of one type", param="body.prompt")
    texts: list[Json] = [many] if kinds == {int} else many
    prompts = []
    for item in texts:
        if isinstance(item, str):
            start = [int(Special.BOS)] if body.add_special_tokens else []
            prompts.append(Prompt(start + encode(item)))
        else:
            check_vocabulary(item, param=None)
            prompts.append(Prompt(list(item)))
    return prompts


def tokenize(body: TokenizeBody) -> list[int]:
    if body.messages is None:
        if body.prompt is None:
            raise ApiError.invalid("Field required", param="body.prompt")
        start = [int(Special.BOS)] if body.add_special_tokens in (None, True) else []
        return start + encode(body.prompt)
    if body.chat_template is not None:
        raise _untrusted_template()
    if body.continue_final_message and body.add_generation_prompt:
        raise ApiError.bad_request("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    return render(
        ChatFields(
            messages=body.messages,
            tools=body.tools,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
    ).tokens


def check_vocabulary(ids: list[int], *, param: str | None) -> None:
    for token in ids:
        if not 0 <= token < VOCAB_SIZE:
            raise ApiError.bad_request(f"Token id {token} is out of vocabulary", param=param)


def chat_script(body: ChatBody) -> Script:
    """A tool call where the request has tools and the user spoke last, or where one is demanded; else text or JSON."""
    tools = {tool["function"]["name"]: tool["function"] for tool in body.tools or ()}
    choice = body.tool_choice
    if isinstance(choice, dict):
        return Script(tool=tools[choice["function"]["name"]])
    wanted = choice == "required" or (choice != "none" and body.messages and body.messages[-1].get("role") == "user")
    if tools and wanted:
        return Script(tool=next(iter(tools.values())))
    return Script(schema=_schema(body.response_format))


def _common(body: GenerationBody, request_id: str | None) -> dict[str, Any]:
    options = body.stream_options or {}
    include_usage = bool(options.get("include_usage"))
    return {
        "id": request_id or body.request_id or uuid.uuid4().hex,
        "min_tokens": body.min_tokens or 0,
        "n": body.n or 1,
        "stop": tuple([body.stop] if isinstance(body.stop, str) else body.stop or ()),
        "stop_token_ids": frozenset(body.stop_token_ids or ()),
        "include_stop": body.include_stop_str_in_output,
        "ignore_eos": body.ignore_eos,
        "skip_special_tokens": body.skip_special_tokens,
        "stream": bool(body.stream),
        "include_usage": include_usage,
        "continuous_usage": include_usage and bool(options.get("continuous_usage_stats")),
        "return_token_ids": bool(body.return_token_ids),
        "salt": body.cache_salt or "",
        "sampling": {"temperature": body.temperature, "top_p": body.top_p, "seed": body.seed},
    }


def _check_common(body: GenerationBody) -> None:
    if body.stream_options and not body.stream:
        raise ApiError.bad_request("Stream options can only be defined when `stream=True`.", param="stream_options")
    if body.cache_salt == "":
        raise ApiError.bad_request("Parameter 'cache_salt' must be a non-empty string if provided.", param="cache_salt")
    if body.cache_salt and (len(body.cache_salt) > 128 or set(body.cache_salt) & set("@/\\\0")):
        raise ApiError.bad_request(
            "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', or NUL.",
            param="cache_salt",
        )
    wanted = body.response_format or {}
    if wanted.get("type") == "json_schema" and wanted.get("json_schema") is None:
        raise ApiError.bad_request(
            "When response_format type is 'json_schema', the 'json_schema' field must be provided.",
            param="response_format",
        )
    if body.n is not None and body.n < 1:
        raise ApiError.bad_request(f"n must be at least 1, got {body.n}.", param="n")
    if body.n is not None and body.n > 1 and body.temperature == 0:
        raise ApiError.bad_request(f"n must be 1 when using greedy sampling, got {body.n}.")
    if body.temperature is not None and body.temperature < 0:
        raise ApiError.bad_request(f"temperature must be non-negative, got {body.temperature}.", param="temperature")


def _check_tools(body: ChatBody) -> None:
    if body.continue_final_message and body.add_generation_prompt:
        raise ApiError.bad_request("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    if body.tools == []:
        raise ApiError.bad_request(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
            param="tools",
        )
    for index, tool in enumerate(body.tools or ()):
        if not isinstance(tool.get("function"), dict) or not isinstance(tool["function"].get("name"), str):
            raise ApiError.invalid("Field required", param=f"body.tools.{index}.function.name")
    choice = body.tool_choice
    if choice in (None, "none"):
        return
    if not body.tools:
        raise ApiError.bad_request("When using `tool_choice`, `tools` must be set.", param="tool_choice")
    if isinstance(choice, str):
        if choice not in ("auto", "required"):
            raise ApiError.bad_request(
                f"Invalid value for `tool_choice`: {choice}! "
                'Only named tools, "none", "auto" or "required" are supported.',
                param="tool_choice",
            )
        return
    function = choice.get("function") if choice else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise ApiError.bad_request(
            "Expected field `name` in `function` in `tool_choice`!", param="tool_choice.function"
        )
    if name not in [tool["function"]["name"] for tool in body.tools]:
        raise ApiError.bad_request(
            "The tool specified in `tool_choice` does not match any of the specified `tools`", param="tool_choice"
        )


def _take_prompt_ids(body: ChatBody) -> tuple[dict[str, Json] | None, list[int] | None]:
    """The parameters without `prompt_token_ids`, and those ids where they replace the messages (chat only)."""
    params = _params(body)
    if params is None or (ids := params.pop("prompt_token_ids", None)) is None:
        return params, None
    if body.echo or has_media(body.messages):
        return params, None
    where = "kv_transfer_params.prompt_token_ids"
    if not isinstance(ids, list) or not ids or any(type(x) is not int or x < 0 for x in ids):
        raise ApiError.bad_request(
            "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers.", param=where
        )
    check_vocabulary(ids, param=where)
    return params, ids


def _params(body: GenerationBody) -> dict[str, Json] | None:
    """The request's transfer parameters, or their twin among the extra arguments, which vLLM passes on unchecked."""
    if body.kv_transfer_params is not None:
        return dict(body.kv_transfer_params)
    smuggled = (body.vllm_xargs or {}).get("kv_transfer_params")
    if smuggled is not None and not isinstance(smuggled, Mapping):
        raise ApiError.internal(f"'{type(smuggled).__name__}' object has no attribute 'get'")
    return dict(smuggled) if smuggled is not None else None


def _truncated(prompt: Prompt, body: GenerationBody, max_model_len: int) -> Prompt:
    keep = body.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep > max_model_len:
        raise ApiError.bad_request(
            f"truncate_prompt_tokens={keep} cannot be greater than max_model_len = {max_model_len}. "
            "Please request a smaller truncation size.",
            param="truncate_prompt_tokens",
        )
    keep = max_model_len - 1 if keep == -1 else keep
    start = 0 if body.truncation_side == "right" else max(len(prompt.tokens) - keep, 0)
    tokens = prompt.tokens[start : start + keep]
    return Prompt(tokens, {i - start: value for i, value in prompt.features.items() if 0 <= i - start < len(tokens)})


def _max_tokens(prompt: Prompt, limit: int | None, min_tokens: int, max_model_len: int) -> int:
    length = len(prompt.tokens)
    room = max_model_len - length
    if limit is not None and limit > max_model_len:
        raise ApiError.bad_request(
            f"max_tokens={limit} cannot be greater than max_model_len={max_model_len}. Please request fewer output tokens.",
            param="max_tokens",
            value=limit,
        )
    if room < 0:
        raise ApiError.bad_request(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains {length} input "
            "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
            param="input_tokens",
            value=length,
        )
    most = room if limit is None else min(limit, room)
    if most < 1:
        raise ApiError.bad_request(f"max_tokens must be at least 1, got {most}.", param="max_tokens", value=most)
    if min_tokens > most:
        raise ApiError.bad_request(f"min_tokens must be less than or equal to max_tokens={most}, got {min_tokens}.")
    return most


def _with_reasoning(message: Mapping[str, Json]) -> Mapping[str, Json]:
    """The deprecated `reasoning_content` counts as `reasoning` in the chat endpoint."""
    if "reasoning_content" not in message:
        return message
    renamed = {key: value for key, value in message.items() if key != "reasoning_content"}
    if renamed.get("reasoning") is None:
        renamed["reasoning"] = message["reasoning_content"]
    return renamed


def _schema(response_format: Mapping[str, Json] | None) -> Mapping[str, Json] | None:
    match (response_format or {}).get("type"):
        case "json_object":
            return {}
        case "json_schema":
            return dict(response_format["json_schema"].get("schema") or {}) if response_format else None
        case _:
            return None


def _untrusted_template() -> ApiError:
    return ApiError.bad_request(
        "Chat template is passed with request, but --trust-request-chat-template is not set. "
        "Refused request with untrusted chat template."
    )
