"""Context variables: LangChain's thread, made visible where the model is called by itself.

Sequences, agents and LangGraph carry a call's `configurable`, and in it the thread, in a context variable, in which
`backhaul_router.identity.frameworks` finds it. A model that is called by itself gets it as an argument of the public methods
(`invoke`, `stream` ...) and drops it. These put it into that variable while LangChain's own code runs, and never while the
caller's does: a generator shares its caller's context.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar, cast

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config, var_child_runnable_config

_T = TypeVar("_T")
_Scope: TypeAlias = "Callable[[], contextlib.AbstractContextManager[None]]"

_WORDS = ("thread_id", "checkpoint_ns")


def configurable_of(config: RunnableConfig | None) -> Mapping[str, Any]:
    """What a call's config says, with what the context around it adds."""
    return ensure_config(config).get("configurable") or {}


@contextlib.contextmanager
def inside(configurable: Mapping[str, Any]) -> Iterator[None]:
    """Has the context say what a call's config does."""
    if "thread_id" not in configurable:
        yield
        return
    around = var_child_runnable_config.get() or {}
    token = var_child_runnable_config.set(cast("RunnableConfig", {**around, "configurable": dict(configurable)}))
    try:
        yield
    finally:
        var_child_runnable_config.reset(token)


def noted(config: RunnableConfig | None) -> RunnableConfig | None:
    """A config whose run's metadata says it too, as LangGraph's does, for a call that begins later."""
    known = _known(configurable_of(config))
    if "thread_id" not in known:
        return config
    given = config or {}
    return cast("RunnableConfig", {**given, "metadata": known | (given.get("metadata") or {})})


def noted_in(metadata: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The `configurable` that a run's metadata speaks of, where the context does not say it itself."""
    return {} if "thread_id" in configurable_of(None) else _known(metadata or {})


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {word: values[word] for word in _WORDS if word in values}


def each_in(scope: _Scope, steps: Iterator[_T]) -> Generator[_T, None, None]:
    """Takes each step of an iterator inside `scope()`, which is left while the caller has the step."""
    with contextlib.closing(cast("Generator[_T, None, None]", steps)):
        while True:
            with scope():
                try:
                    step = next(steps)
                except StopIteration:
                    return
            yield step


async def aeach_in(scope: _Scope, steps: AsyncIterator[_T]) -> AsyncGenerator[_T, None]:
    """The same of an asynchronous iterator."""
    async with contextlib.aclosing(cast("AsyncGenerator[_T, None]", steps)):
        while True:
            with scope():
                try:
                    step = await anext(steps)
                except StopAsyncIteration:
                    return
            yield step
