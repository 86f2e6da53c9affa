"""Adapters for frameworks: the conversation that a call is in, read from the framework's context variables.

Nothing is imported: a framework that the process has not loaded is not in use. What is read are the frameworks' own words for
a conversation; where their internals have changed, that costs the discovery and is logged once, and the call goes on.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Final

from .agent_headers import BAGGAGE_KEYS, BAGGAGE_SPACE
from .ids import Identity, named, nested

_log = logging.getLogger("backhaul")

_NO_TRACE: Final = "no-op"
_CHANGED: Final = (AttributeError, TypeError, ValueError, LookupError, ImportError)
"""What reading internals that have changed comes to."""
_warned: set[str] = set()


def discover() -> Identity | None:
    """The conversation of the calling context: its id, where it is from, and its parent where it is a sub-graph's.

    `by_history` marks ids of single runs, which a conversation may have many of."""
    for module_name, read in _READERS.items():
        module = sys.modules.get(module_name)
        if module is None:
            continue
        try:
            found = read(module)
        except _CHANGED as error:
            if module_name not in _warned:
                _warned.add(module_name)
                _log.warning(
                    "%s is not as Backhaul knows it (%r): conversations are not named by it. Name them with "
                    "backhaul.conversation(), or go by their histories",
                    module_name,
                    error,
                )
            continue
        if found is not None:
            return found
    return None


def _langgraph(module: ModuleType) -> Identity | None:
    """A LangGraph thread, also set by plain LangChain sequences. `checkpoint_ns` is `node:<task>|node:<task>`: its last part
    is the node that calls, the others are the way to the sub-graph that the node is in. Task ids are new at each step."""
    config = module.var_child_runnable_config.get()
    configurable = config.get("configurable") if config else None
    if not isinstance(configurable, Mapping) or configurable.get("thread_id") in (None, ""):
        return None
    thread, namespace = str(configurable["thread_id"]), configurable.get("checkpoint_ns")
    parts = namespace.split("|")[:-1] if isinstance(namespace, str) else []
    path = [name for part in parts if (name := part.partition(":")[0]) and not name.isdecimal()]
    return nested("langgraph", thread, "|".join(path), "framework:langgraph", above="|".join(path[:-1]))


def _pydantic_ai(module: ModuleType) -> Identity | None:
    context = module.get_current_run_context()
    if context is None:
        return None
    source = "framework:pydantic-ai"
    if found := named("pydantic-ai", context.conversation_id, source):
        return found
    return named("pydantic-ai", context.run_id, source, by_history=True)


def _openai_agents(module: ModuleType) -> Identity | None:
    """A trace's group, else the trace, which is one run's. Read without its provider, which would start an exporter."""
    trace = module.Scope.get_current_trace()
    if trace is None or trace.trace_id == _NO_TRACE:
        return None
    source = "framework:openai-agents"
    if found := named("openai-agents", getattr(trace, "group_id", None), source):
        return found
    return named("openai-agents", trace.trace_id, source, by_history=True)


def _opentelemetry(module: ModuleType) -> Identity | None:
    for key in BAGGAGE_KEYS:
        if found := named(BAGGAGE_SPACE, module.get_baggage(key), "framework:opentelemetry"):
            return found
    return None


_READERS: Final[Mapping[str, Callable[[ModuleType], Identity | None]]] = {
    "langchain_core.runnables.config": _langgraph,
    "pydantic_ai._run_context": _pydantic_ai,
    "agents.tracing.scope": _openai_agents,
    "opentelemetry.baggage": _opentelemetry,
}
"""By the module that is read, in the order of which goes first."""
