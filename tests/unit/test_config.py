"""What a router is told, and that every mistake in it is named."""

from __future__ import annotations

from typing import Any

import pytest
from backhaul_router.config import RouterConfig
from backhaul_router.engines.http_client import HttpClient
from backhaul_router.errors import ConfigError
from backhaul_router.ledger.redis_link import RedisLink
from backhaul_router.report import Route

P, D = "http://127.0.0.1:8100", "http://127.0.0.1:8200"


def config(**fields: Any) -> RouterConfig:
    return RouterConfig(**{"prefill": [P], "decode": [D], **fields})


def test_two_lists_of_urls_will_do() -> None:
    made = config()
    assert (made.prefill, made.decode) == ((P,), (D,))
    assert (made.decoder_kv_blocks_ttl, made.kv_recompute_threshold) == (480.0, 64)


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("http://host:1/", "http://host:1"),
        ("http://host:1/v1", "http://host:1"),
        ("http://host:1/v1/", "http://host:1"),
        ("https://host", "https://host"),
        ("http://[::1]:8100", "http://[::1]:8100"),
        ("http://host:1/engines/a", "http://host:1/engines/a"),
        ("HTTP://LocalHost:80/", "http://localhost"),
        ("https://host:443/A", "https://host/A"),
        ("http://bücher.example:8100", "http://xn--bcher-kva.example:8100"),
    ],
)
def test_an_engines_url_is_its_base(url: str, kept: str) -> None:
    assert config(decode=[url]).decode == (kept,)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:8100",
        "localhost",
        "ftp://host",
        "http://",
        "http://host:x",
        "http://host:0",
        "http://host:99999",
        "http://[::1:8100",
        "http://[foo]:8100",
        "http://[::1]x:8100",
        "http://::1:8100",
        "http://a b:8100",
        "http://a\0:8100",
        5,
        None,
    ],
)
def test_what_is_no_url_is_quoted(url: Any) -> None:
    with pytest.raises(ConfigError, match="prefill=") as caught:
        config(prefill=[url])
    assert repr(url) in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://u:secret@host:1", "http://secret@host:1", "http://host:1?k=secret", "http://host:1#x"]
)
def test_credentials_in_a_url_are_refused_and_not_quoted(url: str) -> None:
    with pytest.raises(ConfigError, match="decode=: host: credentials") as caught:
        config(decode=[url])
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://u:hidden@[::1:8100",
        "http://u:hidden@host:x",
        "http://u:hid[den@host",
        "ftp://u:hidden@host",
        "u:hidden@host:8100",
        "hidden@host",
        "http:/u:hidden@host",
        "http:u:hidden@host",
        "https:\\\\u:hidden@host",
        "http://host:x?token=hidden",
        "ftp://host/#hidden",
        "http://u:hid?den@host:x",
    ],
)
def test_what_is_no_url_is_shown_without_its_credentials(url: str) -> None:
    with pytest.raises(ConfigError, match=r"decode=: .* is not an engine's URL") as caught:
        config(decode=[url])
    assert "hid" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("http://host", "should begin with"),
        (5, "should begin with"),
        ("redis://[::1", "is not a URL"),
        ("redis://:hidden@[::1:6379/0", "is not a URL"),
        ("redis://:hid/den@host", "is not a URL"),
        ("rediss://:hid[den@host", "is not a URL"),
        ("redis://host:port", "is not a URL"),
    ],
)
def test_what_is_no_url_of_redis_is_refused_and_not_shown(url: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=f"^redis_url= {what}") as caught:
        config(redis_url=url)
    assert "hid" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["redis://[::1]:6379/0", "redis://", "rediss://u:p%2Fw@host", "unix:///run/r.sock?db=1"]
)
def test_a_url_of_redis(url: str) -> None:
    assert config(redis_url=url).redis_url == url


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("hidden\n", "a line end as character 7 of 7"),
        ("hidden\r\nX-Evil: 1", "a line end as character 7 of 17"),
        ("hidden\0", "a control character as character 7"),
        (" hidden", "a space as character 1"),
        ("hidd\u00e9n", "one that is not ASCII as character 5"),
        ("", "is empty"),
        (b"hidden", "is a text, not bytes"),
    ],
    ids=repr,
)
@pytest.mark.parametrize(
    "make", [lambda key: config(api_key=key), lambda key: HttpClient(api_key=key)], ids=["settings", "client"]
)
def test_an_engines_key_that_cannot_be_in_a_requests_head_is_refused_and_not_quoted(
    make: Any, key: Any, what: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^api_key: .*BACKHAUL_ENGINE_API_KEY\) .*{what}") as caught:
        make(key)
    assert "hid" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_configuration_that_is_printed_shows_no_secret() -> None:
    assert "hidden" not in repr(config(api_key="hidden", redis_url="redis://:hidden@host/0"))


@pytest.mark.parametrize(
    ("option", "what"),
    [
        ("protocol=9", "protocol must be"),
        ("socket_timeout=soon", "Invalid value for 'socket_timeout'"),
        ("no_such=1", "no_such"),
    ],
)
def test_an_option_that_redis_does_not_know_is_told_at_the_start(option: str, what: str) -> None:
    pytest.importorskip("redis")
    with pytest.raises(ConfigError, match=f"^redis_url='redis://host:1': .*{what}") as caught:
        RedisLink(f"redis://:hidden@host:1?{option}", 1.0)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("field", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("urls", "what"), [([], "is empty"), (P, "takes a list"), (None, "takes a list"), ({P}, "list")]
)
def test_engines_come_as_a_list_that_is_not_empty(field: str, urls: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}=.*{what}"):
        config(**{field: urls})


def test_an_engine_has_one_role() -> None:
    with pytest.raises(ConfigError, match=r"8100.*both prefill= and decode="):
        config(decode=[D, P + "/v1"])


def test_an_engine_is_listed_once() -> None:
    with pytest.raises(ConfigError, match="decode= lists the same engine twice"):
        config(decode=[D, D + "/"])


def test_a_route_may_be_a_word() -> None:
    assert config(route="local").route is Route.LOCAL
    with pytest.raises(ConfigError, match=r"route='hot'.*cold, warm, local"):
        config(route="hot")


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("kv_recompute_threshold", -1),
        ("local_max_tokens", -1),
        ("decoder_kv_blocks_ttl", 0),
        ("prefill_timeout_s", 0),
        ("decode_timeout_s", -1),
        ("connect_timeout_s", float("nan")),
        ("max_idle_s", 0),
        ("one_shot_s", float("inf")),
        ("decoder_kv_blocks_ttl", float("inf")),
        ("max_body_bytes", 0),
        ("max_conversations", 0),
        ("max_branches", 0),
        ("lease_margin_s", -1),
        ("lease_margin_s", 480.0),
    ],
)
def test_a_number_out_of_range_is_named_with_its_value(field: str, bad: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field}={bad}"):
        config(**{field: bad})


@pytest.mark.parametrize(
    "good",
    [
        {"kv_recompute_threshold": 0},
        {"local_max_tokens": 0},
        {"lease_margin_s": 0},
        {"decoder_kv_blocks_ttl": 20.0, "lease_margin_s": 19.9},
    ],
)
def test_the_smallest_values_are_allowed(good: dict[str, Any]) -> None:
    config(**good)


@pytest.mark.parametrize("field", ["kv_recompute_threshold", "decoder_kv_blocks_ttl", "max_branches", "lease_margin_s"])
def test_a_value_of_another_type_is_named(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        config(**{field: "64"})


def test_an_unknown_field_is_told() -> None:
    with pytest.raises(TypeError, match="prefil"):
        config(prefil=[P])
