"""Validated settings of a router: engines, thresholds, limits. Checked whole, with errors that name the field."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from . import engine_key, ranks, urls
from .errors import ConfigError
from .report import Route

_TOKENS = ("kv_recompute_threshold", "local_max_tokens")
_SECONDS = (
    "decoder_kv_blocks_ttl",
    "prefill_timeout_s",
    "decode_timeout_s",
    "connect_timeout_s",
    "max_idle_s",
    "one_shot_s",
    "redis_timeout_s",
)
_REDIS = ("redis", "rediss", "unix")
_COUNTS = ("max_body_bytes", "max_conversations", "max_conversations_per_tenant", "max_branches")


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Settings of one router. Names and defaults are those that vLLM publishes, where it has them."""

    prefill: tuple[str, ...]
    """Base URLs of the prefill engines, such as `http://127.0.0.1:8100`."""
    decode: tuple[str, ...]
    reuse: bool = True
    """False runs every turn cold and releases what it leaves."""
    match_history: bool = True
    """A request that names no conversation belongs to the one whose messages it continues, or begins one without a name. False:
    it belongs to none, and leaves nothing."""
    exact_histories: bool = False
    """An assistant's message that comes back as it was answered, but as other tokens (tokenised anew, its reasoning left out, its
    tool calls written anew), is replaced by the tokens that the engine made: the model reads what it wrote, and all of it can
    be reused. Chat completions only. It keeps the tokens of every history, four bytes each, and renders every prompt."""
    route: Route | None = None
    """Forces a route wherever it is possible and exact, for tests and measurements."""
    decoder_kv_blocks_ttl: float = 480.0
    """Seconds for which D keeps a finished turn's blocks: what the engines were started with."""
    lease_margin_s: float = 10.0
    """A handle is not used in the last seconds before its lease ends."""
    kv_recompute_threshold: int = 64
    """Tokens: fewer than these are computed rather than read."""
    local_max_tokens: int = 64
    """A turn whose uncached suffix on D is at most this long runs there alone. Where D runs our connector and measured rates
    say that it is clearly faster, a longer one does too, up to sixteen times this. 0 switches `local` off."""
    place_by_cost: bool = True
    """False: the thresholds alone choose the route, whatever was measured."""
    load_interval_s: float = 2.0
    """How often engines are asked for their load while turns come, where a role has several; 0 never asks, and turns are
    placed by what this router itself runs there."""
    prefill_timeout_s: float = 120.0
    """The prefill leg's hard limit."""
    check_pairs: bool = True
    """Tries with a tiny exchange, before a conversation's history is first read that way, whether a stock prefill engine can
    read from a decode engine: one without bi-directional mode hangs. Engines that run our connector say so instead."""
    retained_tokens_budget: int | None = None
    """Tokens that each decode engine keeps at most for conversations that may go on; `None` for half of its KV cache, where it
    says how much that is. Beyond, what is least expected to be used is released (`retention.py`)."""
    one_shot_s: float = 60.0
    """Seconds for which what a request without a conversation leaves is kept, unless another request continues it; the unit of
    the patience with all conversations, when too much is kept."""
    decode_timeout_s: float = 600.0
    """Longest silence of the decode leg: until its first byte, and between two."""
    connect_timeout_s: float = 5.0
    max_body_bytes: int = 64 * 2**20
    max_conversations: int = 10_000
    max_conversations_per_tenant: int = 10_000
    """Of one tenant, where there are tenants: beyond, its own that was silent for longest goes. A router that has
    `max_conversations` in all drops one of the tenant that has most."""
    max_branches: int = 8
    """Histories that one conversation keeps at a time."""
    max_idle_s: float = 3600.0
    """A conversation that was silent for this long is forgotten."""
    redis_url: str | None = dataclasses.field(default=None, repr=False)
    """A Redis or Valkey server, such as `redis://host:6379/0`, on which routers share what they know of conversations; `None`
    keeps it in the router's memory. Needs the extra `redis`. It may hold a password."""
    redis_prefix: str = "backhaul"
    """Begins every key there. Routers that share it must have the same engines."""
    redis_timeout_s: float = 0.05
    """Longest wait for an answer of that server. Without one a turn reuses nothing that earlier turns left."""
    api_key: str | None = dataclasses.field(default=None, repr=False)
    """Sent to the engines as a bearer token, ASCII without spaces; never taken from the client's request."""
    engine_ca_file: str | None = None
    """PEM file with the certificates of the authorities that engines behind `https` are trusted by, in place of the system's."""

    def __post_init__(self) -> None:
        for field in ("prefill", "decode"):
            urls = getattr(self, field)
            if isinstance(urls, str) or not isinstance(urls, Sequence):
                raise ConfigError(f"{field}= takes a list of engine URLs, not {urls!r}")
            if not urls:
                raise ConfigError(f"{field}= is empty: name at least one {field} engine")
            object.__setattr__(self, field, tuple(engine_url(field, url) for url in urls))
        both = {ranks.split(url)[0] for url in self.prefill} & {ranks.split(url)[0] for url in self.decode}
        if both:
            raise ConfigError(f"{min(both)} is listed under both prefill= and decode=: an engine has one role")
        for field in ("prefill", "decode"):
            urls = getattr(self, field)
            if len(set(urls)) != len(urls):
                raise ConfigError(f"{field}= lists the same engine twice")
            if mixed := ranks.listed_twice(urls):
                raise ConfigError(f"{field}= lists {min(mixed)} both as one engine and by its data-parallel ranks")
        if self.redis_url is not None:
            _check_redis(self.redis_url)
        if self.api_key is not None:
            engine_key.check(self.api_key)
        if not self.redis_prefix:
            raise ConfigError("redis_prefix= is empty: choose a name for this fleet")
        if self.route is not None:
            try:
                object.__setattr__(self, "route", Route(self.route))
            except ValueError:
                raise ConfigError(f"route={self.route!r}: use one of {', '.join(Route)}") from None
        for field in (*_TOKENS, *_SECONDS, *_COUNTS, "lease_margin_s", "load_interval_s"):
            if not isinstance(getattr(self, field), int | float):
                raise ConfigError(f"{field}={getattr(self, field)!r} is not a number")
        for field in _TOKENS:
            if getattr(self, field) < 0:
                raise ConfigError(f"{field}={getattr(self, field)}: a number of tokens, 0 or more")
        budget = self.retained_tokens_budget
        if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 0):
            raise ConfigError(f"retained_tokens_budget={budget!r}: a number of tokens, 0 or more, or None")
        for field in _SECONDS:
            if not 0 < getattr(self, field) < math.inf:
                raise ConfigError(f"{field}={getattr(self, field)}: a number of seconds above 0")
        for field in _COUNTS:
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}={getattr(self, field)}: 1 or more")
        if not self.load_interval_s >= 0:
            raise ConfigError(f"load_interval_s={self.load_interval_s}: a number of seconds, 0 or more")
        if not 0 <= self.lease_margin_s < self.decoder_kv_blocks_ttl:
            raise ConfigError(
                f"lease_margin_s={self.lease_margin_s}: from 0 to below decoder_kv_blocks_ttl={self.decoder_kv_blocks_ttl}"
            )


def engine_url(field: str, url: str) -> str:
    """An engine's URL in its one spelling. Raises `ConfigError`, which names `field`."""
    if not isinstance(url, str):
        raise ConfigError(f"{field}=: {url!r} is not a URL")
    parts = urls.split(url)
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ConfigError(f"{field}=: {urls.shown(url)!r} is not an engine's URL; it should look like http://host:8100")
    rank = re.fullmatch(r"dp=(\d{1,4})", parts.fragment)
    if parts.username or parts.password or parts.query or (parts.fragment and rank is None):
        raise ConfigError(
            f"{field}=: {parts.hostname}: credentials, query and fragment do not belong in an engine's URL, but for #dp=0, "
            "a data-parallel rank"
        )
    try:
        host = parts.hostname if ":" in parts.hostname else parts.hostname.encode("idna").decode()
    except UnicodeError:
        raise ConfigError(
            f"{field}=: {urls.shown(url)!r} is not an engine's URL: no host can have such a name"
        ) from None
    # In one spelling, which is that of messages too: they are searched for it before they are shown to clients elsewhere.
    at = f"[{host}]" if ":" in host else host
    if parts.port not in (None, 443 if parts.scheme == "https" else 80):
        at += f":{parts.port}"
    base = f"{parts.scheme}://{at}{parts.path}".rstrip("/").removesuffix("/v1")
    return base if rank is None else f"{base}#dp={int(rank[1])}"


def _check_redis(url: object) -> None:
    """Nothing of it is shown: where a password is not written as it has to be, nobody knows where it ends."""
    if not isinstance(url, str) or not url.startswith(tuple(f"{scheme}://" for scheme in _REDIS)):
        raise ConfigError(f"redis_url= should begin with one of {', '.join(f'{scheme}://' for scheme in _REDIS)}")
    if urls.split(url) is None:
        raise ConfigError(
            "redis_url= is not a URL; it should look like redis://host:6379/0, an IPv6 address in brackets, and in a password "
            "each of / ? # [ ] @ : percent-encoded"
        )
