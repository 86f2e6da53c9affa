"""LangChain's own standard tests, with the router embedded and elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest.mock import ANY

import backhaul
import httpx
import pytest
from backhaul_langchain import ChatBackhaul
from capable_engines import MODEL, Cluster, cluster
from langchain_core.language_models import BaseChatModel
from langchain_core.load.load import ALL_SERIALIZABLE_MAPPINGS
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests, chat_models
from langchain_tests.unit_tests import ChatModelUnitTests

pytestmark = pytest.mark.openai

assert backhaul.__version__  # the tests run openai's client, and so with both of its majors


@pytest.fixture(scope="module")
def engines() -> Iterator[Cluster]:
    with cluster() as running:
        yield running


class TestUnits(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatBackhaul

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "m", "base_url": "http://router.invalid/v1"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return (
            {"BACKHAUL_API_KEY": "k", "BACKHAUL_BASE_URL": "http://router.invalid/v1"},
            {"model": "m"},
            {"openai_api_key": "k", "openai_api_base": "http://router.invalid/v1"},
        )

    @pytest.fixture
    def benchmark(self, benchmark: Any) -> Any:
        """Once will do."""
        benchmark.disabled = True
        return benchmark

    @pytest.fixture
    def snapshot(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """What a serialised model looks like is tested in `test_chat_model`: here it need only come back, which LangChain
        does for the classes that it has on a list."""
        ours = ("backhaul_langchain", "ChatBackhaul")
        monkeypatch.setitem(ALL_SERIALIZABLE_MAPPINGS, ours, ours)
        return lambda name: ANY


class _Integration(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    async def _where(self, engines: Cluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
        """The suite's pictures and sounds come from the network, ours do not; and it leaves its models open."""
        monkeypatch.setattr(chat_models.httpx, "get", lambda url, **options: httpx.Response(200, content=url.encode()))
        monkeypatch.setenv("LANGCHAIN_TESTS_USER_AGENT", "none")
        self.engines = engines
        self.made: list[ChatBackhaul] = []
        yield
        for model in self.made:
            await model.aclose()

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        made = self.made

        class Noted(ChatBackhaul):
            def model_post_init(self, context: Any, /) -> None:
                super().model_post_init(context)
                made.append(self)

        return Noted

    supports_json_mode = True
    supports_audio_inputs = True
    supports_image_inputs = True
    supports_image_urls = True
    supports_image_tool_message = True
    supports_anthropic_inputs = True
    model_override_value = MODEL
    supported_usage_metadata_details = {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}  # noqa: RUF012

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = self.chat_model_class(**self.chat_model_params)
        model.invoke(QUESTION)
        if not stream:
            return model.invoke(QUESTION)
        first, *rest = model.stream(QUESTION)
        return sum(rest, first)


QUESTION = "What is a KV cache, and who reads it back? " * 8


class TestEmbedded(_Integration):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, **self.engines.engines}


class TestRemote(_Integration):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "base_url": self.engines.router}
