"""`ChatBackhaul`: a LangChain chat model on a Backhaul router, inside this process or elsewhere."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import anyio.to_thread
import backhaul
from backhaul_router.errors import ConfigError
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LangSmithParams, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.utils import from_env, secret_from_env
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai.chat_models.base import BaseChatOpenAI
from pydantic import Field, SecretStr, model_validator

from . import _http, _threads
from ._answers import REPORT, countable, reasoning_of, reported
from ._settings import RouterFields
from ._turns import CallScope

_PROVIDER = "backhaul"
_REASONING = "reasoning_content"
_CLIENTS = ("client", "async_client", "root_client", "root_async_client")
_NO_KEY = "none"
_ELSEWHERE = ("openai_proxy", "http_socket_options")
"""Words of `ChatOpenAI` that only its own HTTP clients have."""


class ChatBackhaul(RouterFields, BaseChatOpenAI):
    """A chat model on a vLLM prefill/decode cluster that reuses the KV cache of earlier turns.

    With `prefill` and `decode` the router runs inside this process, with `base_url` it is a server. `ChatOpenAI`'s words
    mean the same here. A LangChain thread (`config={"configurable": {"thread_id": ...}}`, a LangGraph run) is a
    conversation, unless the call is inside `backhaul.conversation()` or `conversation_id` names one.

    What a call reused is in `usage_metadata["input_token_details"]["cache_read"]`, and the whole report in
    `response_metadata["backhaul"]`, of an answer and of a stream's last chunk.

        model = ChatBackhaul(model="m", prefill=["http://p1:8100"], decode=["http://d1:8200"])
        model = ChatBackhaul(model="m", base_url="http://router:8000/v1")

    Make it once: each embedded model has routers of its own, one for asynchronous calls and one for the others, and
    each knows the turns that it ran.
    """

    model_name: str = Field(alias="model")
    """As the engines serve it."""
    openai_api_key: SecretStr | None = Field(
        alias="api_key", default_factory=secret_from_env("BACKHAUL_API_KEY", default=None)
    )
    """For a router elsewhere; from `BACKHAUL_API_KEY` where it is not given. `OPENAI_API_KEY` is never sent to it."""
    openai_api_base: str | None = Field(alias="base_url", default_factory=from_env("BACKHAUL_BASE_URL", default=None))
    """A router's address, ending with `/v1`; from `BACKHAUL_BASE_URL` where neither it nor engines are given."""
    conversation_id: str | None = None
    """Puts every call into one conversation; as a keyword of a call, that one."""
    replay_reasoning: bool = True
    """Sends a model's earlier reasoning back with its messages, for templates that keep it between tool calls: without it,
    such a prompt differs from what the engines hold. Templates that drop it are not affected."""

    openai_proxy: str | None = None
    stream_usage: bool | None = True
    stream_chunk_timeout: float | None = None
    """Seconds between two chunks of an asynchronous stream, after which it is given up. Unlimited here, as a long prompt says
    nothing while it is prefilled: the router's own `prefill_timeout_s` and `decode_timeout_s` find what stands still."""
    use_responses_api: bool | None = False

    # --- the clients

    @model_validator(mode="after")
    def validate_environment(self) -> Self:
        """Makes the clients. Takes the place of the validator of this name that makes openai's."""
        if self.n is not None and self.n < 1:
            raise ValueError("n must be at least 1")
        if self.n is not None and self.n > 1 and self.streaming:
            raise ValueError("n must be 1 when streaming")
        if self.use_responses_api:
            raise ValueError("use_responses_api: this model speaks chat completions, leave it off")
        for word in _ELSEWHERE:
            if getattr(self, word) is not None:
                raise ValueError(
                    f"{word}= is not for this model: give http_client= and http_async_client= that have it"
                )
        if self.conversation_id is not None:
            backhaul.conversation(self.conversation_id, parent=False)
        unused = "openai_api_base" if self._embedded else "engine_api_key"
        if unused not in self.model_fields_set:  # it is from the environment, and for models of the other kind
            setattr(self, unused, None)
        try:
            self._connect()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    @model_validator(mode="after")
    def _set_backhaul_version(self) -> Self:
        self._add_version("backhaul", backhaul.__version__)
        return self

    def _connect(self) -> None:
        """Raises `ConfigError`."""
        where = self._where()
        made = not self._embedded
        if self.root_client is None:
            http_client = self.http_client or (_http.client() if made else None)
            self.root_client = backhaul.OpenAI(http_client=http_client, **where)
        if self.root_async_client is None:
            http_client = self.http_async_client or (_http.async_client() if made else None)
            self.root_async_client = backhaul.AsyncOpenAI(http_client=http_client, **where)
        self.client = self.client or self.root_client.chat.completions
        self.async_client = self.async_client or self.root_async_client.chat.completions

    def _where(self) -> dict[str, Any]:
        """What both clients are made with."""
        given: dict[str, Any] = {
            "organization": self.openai_organization,
            "timeout": self.request_timeout,
            "max_retries": self.max_retries,
            "default_headers": self.default_headers,
            "default_query": self.default_query,
        }
        options = {name: value for name, value in given.items() if value is not None} | self._router_settings()
        if self._embedded:
            return options | {
                "prefill": self.prefill,
                "decode": self.decode,
                "engine_api_key": _shown(self.engine_api_key) or None,
                "base_url": self.openai_api_base,
            }
        if self.openai_api_base is None:
            raise ConfigError(
                "name the engines with prefill= and decode=, or a router with base_url= (or BACKHAUL_BASE_URL), "
                "such as http://router:8000/v1"
            )
        return options | {
            "engine_api_key": _shown(self.engine_api_key) or None,
            "base_url": self.openai_api_base,
            "api_key": _shown(self.openai_api_key) or _NO_KEY,
        }

    @property
    def _embedded(self) -> bool:
        return self.prefill is not None or self.decode is not None

    @property
    def _uses_gateway(self) -> bool:
        return False

    def close(self) -> None:
        """Closes the client of synchronous calls: its embedded router releases what the engines hold."""
        self.root_client.close()

    async def aclose(self) -> None:
        """Closes both clients."""
        await self.root_async_client.close()
        await anyio.to_thread.run_sync(self.root_client.close)

    # --- what LangChain asks about a model

    @property
    def _llm_type(self) -> str:
        return "backhaul-chat"

    @property
    def lc_secrets(self) -> dict[str, str]:
        return {"openai_api_key": "BACKHAUL_API_KEY", "engine_api_key": "BACKHAUL_ENGINE_API_KEY"}

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        return ["backhaul_langchain"]

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return True

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return {**super()._get_ls_params(stop=stop, **kwargs), "ls_provider": _PROVIDER}

    def _resolve_model_profile(self) -> ModelProfile | None:
        """None: a served model's name says nothing about it. `profile=` does."""
        return None

    def __getstate__(self) -> dict[Any, Any]:
        """Without the clients, which the copy makes anew. A caller's own HTTP client is left to pickle's judgement."""
        state = dict(super().__getstate__())
        state["__dict__"] = {name: value for name, value in state["__dict__"].items() if name not in _CLIENTS}
        return state

    def __setstate__(self, state: dict[Any, Any]) -> None:
        state["__dict__"] |= dict.fromkeys(_CLIENTS)
        super().__setstate__(state)
        self._connect()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Shares the clients, as `model_copy` does."""
        memo = {} if memo is None else memo
        for shared in (*_CLIENTS, "http_client", "http_async_client"):
            memo[id(getattr(self, shared))] = getattr(self, shared)
        return super().__deepcopy__(memo)

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        method: Literal["function_calling", "json_mode", "json_schema"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        tools: list[Any] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """As `ChatOpenAI` has it: by default the engine holds the answer to the schema, whatever the model."""
        return super().with_structured_output(
            schema, method=method, include_raw=include_raw, strict=strict, tools=tools, **kwargs
        )

    def get_num_tokens_from_messages(
        self, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None, **options: Any
    ) -> int:
        """As the engines' own tokenizer and chat template have them. Asks the router, and blocks until it answers; `options` of
        `ChatOpenAI`'s method mean nothing here."""
        asked: dict[str, Any] = {"messages": self._get_request_payload(list(messages))["messages"]}
        if tools:
            asked["tools"] = [convert_to_openai_tool(tool) for tool in tools]
        return int(self._tokenized(asked)["count"])

    def get_token_ids(self, text: str) -> list[int]:
        """The same of a text alone."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return list(self._tokenized({"prompt": text, "add_special_tokens": False})["tokens"])

    def _tokenized(self, asked: dict[str, Any]) -> dict[str, Any]:
        url = str(self.root_client.base_url).removesuffix("v1/") + "tokenize"
        answer: dict[str, Any] = self.root_client.post(url, body={"model": self.model_name, **asked}, cast_to=object)
        return answer

    # --- the public calls, which alone see their config

    if not TYPE_CHECKING:  # checkers see the base's own signatures

        @functools.wraps(BaseChatOpenAI.invoke)
        def invoke(self, input, config=None, **kwargs):
            with _inside(config)():
                return super().invoke(input, config, **kwargs)

        @functools.wraps(BaseChatOpenAI.ainvoke)
        async def ainvoke(self, input, config=None, **kwargs):
            with _inside(config)():
                return await super().ainvoke(input, config, **kwargs)

        @functools.wraps(BaseChatOpenAI.stream)
        def stream(self, input, config=None, **kwargs):
            yield from _threads.each_in(_inside(config), super().stream(input, config, **kwargs))

        @functools.wraps(BaseChatOpenAI.astream)
        async def astream(self, input, config=None, **kwargs):
            steps = _threads.aeach_in(_inside(config), super().astream(input, config, **kwargs))
            async with contextlib.aclosing(steps):
                async for chunk in steps:
                    yield chunk

        @functools.wraps(BaseChatOpenAI.stream_events)
        def stream_events(self, input, config=None, **kwargs):
            return super().stream_events(input, _threads.noted(config), **kwargs)

        @functools.wraps(BaseChatOpenAI.astream_events)
        def astream_events(self, input, config=None, **kwargs):
            return super().astream_events(input, _threads.noted(config), **kwargs)

    # --- one call

    def _call_scope(self, conversation_id: str | None, run_manager: Any) -> CallScope:
        """What was said explicitly, then the scope around the call, then LangChain's thread."""
        if conversation_id is not None:
            backhaul.conversation(conversation_id, parent=False)
        metadata = run_manager.metadata if run_manager is not None else None
        return CallScope(conversation_id or self.conversation_id, embedded=self._embedded, metadata=metadata)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        *,
        conversation_id: str | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        scope = self._call_scope(conversation_id, run_manager)
        with scope.entered():
            result = super()._generate(messages, stop, run_manager, **kwargs)
        return reported(result, scope)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        *,
        conversation_id: str | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        scope = self._call_scope(conversation_id, run_manager)
        with scope.entered():
            result = await super()._agenerate(messages, stop, run_manager, **kwargs)
        return reported(result, scope)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        *,
        stream_usage: bool | None = None,
        conversation_id: str | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        scope = self._call_scope(conversation_id, run_manager)
        chunks = super()._stream(messages, stop, run_manager, stream_usage=stream_usage, **kwargs)
        yield from _threads.each_in(scope.entered, chunks)
        if (last := self._last_chunk(scope)) is not None:
            if run_manager is not None:
                run_manager.on_llm_new_token("", chunk=last)
            yield last

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        *,
        stream_usage: bool | None = None,
        conversation_id: str | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        scope = self._call_scope(conversation_id, run_manager)
        chunks = super()._astream(messages, stop, run_manager, stream_usage=stream_usage, **kwargs)
        async with contextlib.aclosing(_threads.aeach_in(scope.entered, chunks)) as steps:
            async for chunk in steps:
                yield chunk
        if (last := self._last_chunk(scope)) is not None:
            if run_manager is not None:
                await run_manager.on_llm_new_token("", chunk=last)
            yield last

    def _last_chunk(self, scope: CallScope) -> ChatGenerationChunk | None:
        """The report is complete only when the stream has ended, so it has a chunk of its own."""
        if scope.report is None:
            return None
        metadata: dict[str, Any] = {REPORT: scope.report.to_dict()}
        if self.output_version == "v1":
            metadata["output_version"] = "v1"
        message = AIMessageChunk(content="", response_metadata=metadata, chunk_position="last")
        return ChatGenerationChunk(message=message)

    # --- requests and answers

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        payload: dict[str, Any] = super()._get_request_payload(input_, stop=stop, **kwargs)
        if self.replay_reasoning:
            messages = self._convert_input(input_).to_messages()
            for message, sent in zip(messages, payload["messages"], strict=True):
                if isinstance(message, AIMessage) and (reasoning := message.additional_kwargs.get(_REASONING)):
                    sent["reasoning"] = reasoning
        return payload

    def _create_chat_result(self, response: Any, generation_info: dict[str, Any] | None = None) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        output = result.llm_output or {}
        output["model_provider"] = _PROVIDER
        if (usage := output.get("token_usage")) is not None:
            output["token_usage"] = countable(usage)
        choices = response["choices"] if isinstance(response, dict) else response.choices
        for generation, choice in zip(result.generations, choices, strict=True):
            message = choice["message"] if isinstance(choice, dict) else choice.message.model_extra or {}
            if reasoning := reasoning_of(message):
                generation.message.additional_kwargs[_REASONING] = reasoning
        return result

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], default_chunk_class: type, base_generation_info: dict[str, Any] | None
    ) -> ChatGenerationChunk | None:
        converted = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)
        if converted is None:
            return None
        message = converted.message
        if "model_provider" in message.response_metadata:
            message.response_metadata["model_provider"] = _PROVIDER
        inner = chunk.get("chunk") or chunk  # openai's stream of a structured answer wraps the chunks
        choices = inner.get("choices") or []
        if choices and (reasoning := reasoning_of(choices[0].get("delta") or {})):
            message.additional_kwargs[_REASONING] = reasoning
        return converted


def _inside(config: Any) -> Callable[[], contextlib.AbstractContextManager[None]]:
    return functools.partial(_threads.inside, _threads.configurable_of(config))


def _shown(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()
