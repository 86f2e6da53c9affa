"""Codec of vLLM's wire protocol, as bytes: what is read from a client's request, what P and D are sent, what comes back, and
what never leaves. No state, no I/O."""

from .answer import client_answer, disowns_model, error_message, no_handle_in, read_answer, read_ids, read_left
from .handle import Handle, cut_handle, no_handle, process_of, quotes_handle, read_params, whole_handle
from .json_members import FORBIDDEN, HANDLE, MalformedBody, Members, join, passed_body, split, without_handles
from .legs import decode_body, encode_ids, prefill_body, release_body
from .render import closed_body, read_rendered, render_body, rendering, stop_tokens, tokenize_body
from .request import Endpoint, Facts, api_of, read_request
from .usage import Usage, noted, read_usage

__all__ = [
    "FORBIDDEN",
    "HANDLE",
    "Endpoint",
    "Facts",
    "Handle",
    "MalformedBody",
    "Members",
    "Usage",
    "api_of",
    "client_answer",
    "closed_body",
    "cut_handle",
    "decode_body",
    "disowns_model",
    "encode_ids",
    "error_message",
    "join",
    "no_handle",
    "no_handle_in",
    "noted",
    "passed_body",
    "prefill_body",
    "process_of",
    "quotes_handle",
    "read_answer",
    "read_ids",
    "read_left",
    "read_params",
    "read_rendered",
    "read_request",
    "read_usage",
    "release_body",
    "render_body",
    "rendering",
    "split",
    "stop_tokens",
    "tokenize_body",
    "whole_handle",
    "without_handles",
]
