"""`OpenAI` and `AsyncOpenAI`: openai's clients, on an embedded router when they are given engines."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, Unpack

import openai
from backhaul_router import urls
from backhaul_router.config import RouterConfig
from backhaul_router.errors import ConfigError
from backhaul_router.identity.identify import FIELDS, HEADERS
from backhaul_router.identity.ids import current

from . import _fast, _http, _remote
from ._conversation import Conversation, Reuse, entered
from ._options import AsyncClientOptions, ClientOptions, router_config, split

if TYPE_CHECKING:
    from openai._models import FinalRequestOptions
    from opentelemetry.trace import TracerProvider

_PLACEHOLDER_KEY = "backhaul-embedded"
_ELSEWHERE = ("base_url", "http_client", "provider", "workload_identity", "data_residency")
"""openai's words that point a client at a server, which an embedded one does not have."""


class _Client:
    """What both clients share. `default_headers` and `_custom_headers` are openai's."""

    _embedded: bool = False
    _bound: Conversation | None = None

    @property
    def reuse(self) -> Reuse:
        """Reports of a client that `for_conversation` returned; others have none of their own."""
        if self._bound is None:
            raise AttributeError(
                "this client belongs to no conversation: use client.for_conversation(id).reuse, "
                "or `with backhaul.conversation() as chat` and chat.reuse"
            )
        return self._bound.reuse

    # Type checkers see openai's own signatures, which differ between its versions.
    if not TYPE_CHECKING:

        def copy(self, **options):
            self._refuse_elsewhere(options)
            return super().copy(**options)._inherit(self)

        with_options = copy

        @cached_property
        def chat(self):
            return _fast.chat(super().chat)

        @cached_property
        def completions(self):
            return _fast.completions(super().completions)

        @cached_property
        def responses(self):
            return _fast.responses(super().responses)

    def for_conversation(self, id: str | None = None) -> Self:
        """A copy whose calls belong to a conversation of their own, wherever they are made; `.reuse` has its reports.

        It shares this client's connections: closing the copy ends the conversation and leaves this client open."""
        bound: Self = self.copy()  # type: ignore[attr-defined]
        bound._bound = Conversation(id)
        return bound

    def _inherit(self, original: _Client) -> Self:
        self._embedded, self._bound = original._embedded, original._bound
        return self

    def _follow(self) -> None:
        """Collects the reports of a router elsewhere. `_client` is openai's HTTP client."""
        client = self._client  # type: ignore[attr-defined]
        if not _http.is_embedded(client):
            _remote.follow(client)

    def _refuse_elsewhere(self, options: Mapping[str, Any]) -> None:
        if self._embedded:
            _refuse(options, "this client runs on an embedded router", "make a new client for another server")

    def _tagged(self, options: FinalRequestOptions) -> FinalRequestOptions:
        """Names the conversation of the scope, or else of the framework, in headers, unless the caller names one: an explicit
        id wins."""
        if self._embedded or self._names_conversation(options):
            return options
        if named := _remote.headers_of(current.get()):
            headers = options.headers if isinstance(options.headers, Mapping) else {}
            options.headers = {**headers, **named}
        return options

    def _names_conversation(self, options: FinalRequestOptions) -> bool:
        headers = [options.headers, getattr(self, "_custom_headers", None)]
        bodies = [options.json_data, options.extra_json]
        return any(
            str(name).lower() in HEADERS for given in headers if isinstance(given, Mapping) for name in given
        ) or any(field in body for body in bodies if isinstance(body, Mapping) for field in FIELDS)


class OpenAI(_Client, openai.OpenAI):
    """`openai.OpenAI`, which runs on an embedded router when it is given `prefill=` and `decode=` engines.

    Takes openai's words and the settings of `RouterConfig`. With engines, no server and no `api_key` are needed;
    `engine_api_key` is what the engines see. `tracer_provider` is OpenTelemetry's, by default the one that the program has set by
    now, if any. Raises `ConfigError` for settings that cannot work together.
    """

    def __init__(
        self,
        *,
        prefill: Sequence[str] | None = None,
        decode: Sequence[str] | None = None,
        engine_api_key: str | None = None,
        tracer_provider: TracerProvider | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        config, rest = _configured(type(self).__name__, prefill, decode, engine_api_key, options, tracer_provider)
        if config is not None:
            rest["http_client"] = _http.embedded_client(config, _http.openais_http_module(), tracer_provider)
        super().__init__(**rest)
        self._embedded = config is not None
        self._follow()

    def close(self) -> None:
        if self._bound is not None:
            self._bound.end()
        else:
            super().close()

    def _prepare_options(self, options: FinalRequestOptions) -> FinalRequestOptions:
        return self._tagged(super()._prepare_options(options))

    if not TYPE_CHECKING:

        def post(self, path, *, body=None, **kwargs):
            return super().post(path, body=_fast.resolved(body), **kwargs)

        def request(self, *args, **kwargs):
            with entered(self._bound):
                return super().request(*args, **kwargs)


class AsyncOpenAI(_Client, openai.AsyncOpenAI):
    """`openai.AsyncOpenAI`, which runs on an embedded router when it is given `prefill=` and `decode=` engines.

    See `OpenAI`.
    """

    def __init__(
        self,
        *,
        prefill: Sequence[str] | None = None,
        decode: Sequence[str] | None = None,
        engine_api_key: str | None = None,
        tracer_provider: TracerProvider | None = None,
        **options: Unpack[AsyncClientOptions],
    ) -> None:
        config, rest = _configured(type(self).__name__, prefill, decode, engine_api_key, options, tracer_provider)
        if config is not None:
            rest["http_client"] = _http.embedded_async_client(config, _http.openais_http_module(), tracer_provider)
        super().__init__(**rest)
        self._embedded = config is not None
        self._follow()

    async def close(self) -> None:
        if self._bound is not None:
            await self._bound.aend()
        else:
            await super().close()

    async def _prepare_options(self, options: FinalRequestOptions) -> FinalRequestOptions:
        return self._tagged(await super()._prepare_options(options))

    if not TYPE_CHECKING:

        async def post(self, path, *, body=None, **kwargs):
            return await super().post(path, body=_fast.resolved(body), **kwargs)

        async def request(self, *args, **kwargs):
            with entered(self._bound):
                return await super().request(*args, **kwargs)


def _configured(
    who: str,
    prefill: Sequence[str] | None,
    decode: Sequence[str] | None,
    engine_api_key: str | None,
    options: Mapping[str, Any],
    tracer_provider: TracerProvider | None,
) -> tuple[RouterConfig | None, dict[str, Any]]:
    """The embedded router's configuration, if there is to be one, and openai's words."""
    settings, rest = split(options)
    if prefill is None and decode is None:
        if engine_api_key is not None:
            settings["engine_api_key"] = engine_api_key
        if tracer_provider is not None:
            settings["tracer_provider"] = tracer_provider
        if settings:
            raise ConfigError(
                f"{who}: {min(settings)}= configures the embedded router: give prefill= and decode= too, "
                "or set it where the router behind base_url= is configured"
            )
        _check_base_url(who, rest.get("base_url"))
        return None, rest
    config = router_config(who, prefill, decode, engine_api_key, settings)
    _refuse(rest, f"{who}: prefill= and decode= make an embedded router", "leave one of the two out")
    if rest.get("api_key") is None:
        rest["api_key"] = _PLACEHOLDER_KEY
    return config, {**rest, "base_url": _http.EMBEDDED_URL}


def _check_base_url(who: str, given: object) -> None:
    """openai's HTTP library says neither which URL is wrong nor whose."""
    name, url = "base_url=", given
    if given is None:
        name, url = "OPENAI_BASE_URL", os.environ.get("OPENAI_BASE_URL")
    module = _http.openais_http_module()
    if not isinstance(url, str):
        return
    try:
        module.URL(url)
    except module.InvalidURL:
        raise ConfigError(
            f"{who}: {name}: {urls.shown(url)!r} is not a URL; it should look like http://router:8000/v1"
        ) from None


def _refuse(options: Mapping[str, Any], why: str, instead: str) -> None:
    for word in _ELSEWHERE:
        value = options.get(word)
        if value is not None and not isinstance(value, openai.NotGiven):
            raise ConfigError(f"{why}, so {word}= has nothing to apply to: {instead}")
