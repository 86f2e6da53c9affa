"""Data-parallel ranks as engines of their own."""

from __future__ import annotations

import pytest
from backhaul_router.config import RouterConfig
from backhaul_router.errors import ConfigError
from backhaul_router.ranks import split
from backhaul_router.wire.engine_metrics import kv_tokens_of, page_of, ranks_of, read_gauges

PAGE = """# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.1
vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="1600"} 1.0
vllm:cache_config_info{block_size="16",engine="1",kv_cache_size_tokens="1600"} 1.0
process_start_time_seconds 5.0
"""


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("http://d1:8200", ("http://d1:8200", None)),
        ("http://d1:8200#dp=1", ("http://d1:8200", "1")),
        ("http://d1:8200#dp=1/v1/models", ("http://d1:8200/v1/models", "1")),
    ],
)
def test_a_rank_is_told_apart_from_its_address(url: str, parts: tuple[str, str | None]) -> None:
    assert split(url) == parts


def test_each_rank_sees_its_own_lines_of_the_page_alone() -> None:
    page = page_of(PAGE.encode(), "http://d1:8200#dp=1")
    gauges = read_gauges(page)
    assert gauges is not None
    assert (gauges.running, gauges.waiting, gauges.kv_usage) == (1, 0, 0.1)
    assert (kv_tokens_of(page), kv_tokens_of(PAGE)) == (1600, 3200)
    assert (ranks_of(page), ranks_of(PAGE)) == (frozenset(), {"0", "1"})
    assert "process_start_time_seconds 5.0" in page
    assert page_of(PAGE.encode(), "http://d1:8200") == PAGE


def test_ranks_are_configured_by_number() -> None:
    config = RouterConfig(prefill=["http://p1"], decode=["http://D1:8200/#dp=0", "http://d1:8200/v1#dp=01"])
    assert config.decode == ("http://d1:8200#dp=0", "http://d1:8200#dp=1")


@pytest.mark.parametrize(
    ("prefill", "decode", "why"),
    [
        ("http://e:1#dp=0", "http://e:1#dp=1", "one role"),
        ("http://p:1", ("http://d:1", "http://d:1#dp=0"), "both as one engine and by its data-parallel ranks"),
        ("http://p:1", ("http://d:1#dp=0", "http://d:1#dp=00"), "the same engine twice"),
        ("http://p:1", "http://d:1#rank=0", "#dp=0, a data-parallel rank"),
    ],
)
def test_what_cannot_be_is_said(prefill: str, decode: str | tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        RouterConfig(prefill=[prefill], decode=[decode] if isinstance(decode, str) else decode)
