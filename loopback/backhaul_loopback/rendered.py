"""Response schemas: what the render endpoints answer."""

from __future__ import annotations

from typing import Any

from .bodies import ChatBody, CompletionBody
from .requests import Call
from .template import Prompt


def generate_request(call: Call, body: ChatBody | CompletionBody, index: int) -> dict[str, Any]:
    """`GenerateRequest` of `scale_out/token_in_token_out/protocol.py`; the sampling parameters in brief."""
    request_id = f"chatcmpl-{call.id}" if call.chat else f"cmpl-{call.id}"
    if len(call.prompts) > 1:
        request_id += f"-{index}"
    sampling = call.sampling | {
        "n": call.n,
        "max_tokens": call.max_tokens[index],
        "min_tokens": call.min_tokens,
        "stop": list(call.stop),
        "stop_token_ids": sorted(call.stop_token_ids),
        "ignore_eos": call.ignore_eos,
    }
    return {
        "request_id": request_id,
        "token_ids": call.prompts[index].tokens,
        "features": _features(call.prompts[index]),
        "sampling_params": sampling,
        "model": body.model,
        "reasoning_ended": None,
        "reasoning_parser_kwargs": None,
        "return_token_ids": None,
        "output_mode": "tokens",
        "stream": call.stream,
        "stream_options": body.stream_options if call.stream else None,
        "cache_salt": body.cache_salt,
        "priority": 0,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def _features(prompt: Prompt) -> dict[str, Any] | None:
    """Which positions hold an image rather than their token, and which image (`MultiModalFeatures`)."""
    if not prompt.features:
        return None
    places = [{"offset": offset, "length": 1} for offset in prompt.features]
    hashes = [f"{content:08x}" for content in prompt.features.values()]
    return {"mm_hashes": {"image": hashes}, "mm_placeholders": {"image": places}}
