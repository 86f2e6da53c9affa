"""Parsing of answers: what of vLLM's and the router's answers LangChain's own code does not know."""

from __future__ import annotations

from typing import Any

from langchain_core.outputs import ChatResult

from ._turns import CallScope

REPORT = "backhaul"
"""In `response_metadata`; and the router's name for its note in `usage`."""


def countable(usage: dict[str, Any]) -> dict[str, Any]:
    """What LangChain can add up: not vLLM's nulls, nor the router's words, which the report has too."""
    known = {name: value for name, value in usage.items() if value is not None and name != REPORT}
    return {name: countable(value) if isinstance(value, dict) else value for name, value in known.items()}


def reasoning_of(message: dict[str, Any]) -> str | None:
    """vLLM's name for it, else the name that it had before, and has elsewhere."""
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    return reasoning if isinstance(reasoning, str) else None


def reported(result: ChatResult, scope: CallScope) -> ChatResult:
    if scope.report is not None:
        for generation in result.generations:
            generation.message.response_metadata[REPORT] = scope.report.to_dict()
    return result
