"""Fail-fast compatibility check: whether the installed vLLM is one that the connector can be trusted with, when an engine starts.

The connector subclasses classes of vLLM that are no public interface. Everything it relies on is named here, so that
another vLLM is refused at start, with the name of what is missing, and not found out by a request.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass

KNOWN = ((0, 32), (0, 33))
NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
WAY_OUT = "start this engine with vLLM's own connector instead (`backhaul up --connector stock`)"


class IncompatibleEngine(RuntimeError):
    """This engine cannot run the connector. The message says why and what to do."""


@dataclass(frozen=True)
class Need:
    """A method of vLLM, with parameters that it must have, or an attribute that its class's source must set."""

    module: str
    owner: str
    """A class; empty for a function of the module."""
    name: str
    parameters: tuple[str, ...] = ()
    attribute: bool = False

    def missing(self) -> str | None:
        try:
            module = importlib.import_module(self.module)
            owner = getattr(module, self.owner) if self.owner else module
        except (ImportError, AttributeError):
            return f"{self.module}.{self.owner}".rstrip(".")
        if self.attribute:
            set_somewhere = any(
                re.search(rf"self\.{self.name}\b[^=\n]*=", inspect.getsource(kind))
                for kind in owner.__mro__
                if kind.__module__.startswith("vllm.")
            )
            return None if set_somewhere else f"{self.owner}.{self.name}"
        name = f"{self.owner or self.module}.{self.name}"
        method = getattr(owner, self.name, None)
        if method is None:
            return name
        lacking = [p for p in self.parameters if p not in inspect.signature(method).parameters]
        return f"{name}({', '.join(lacking)})" if lacking else None


def _methods(module: str, owner: str, **methods: tuple[str, ...]) -> tuple[Need, ...]:
    return tuple(Need(module, owner, name, parameters) for name, parameters in methods.items())


def _attributes(module: str, owner: str, *names: str) -> tuple[Need, ...]:
    return tuple(Need(module, owner, name, attribute=True) for name in names)


NEEDS: tuple[Need, ...] = (
    *_methods(
        f"{NIXL}.pull_scheduler",
        "NixlPullConnectorScheduler",
        __init__=("vllm_config", "engine_id", "kv_cache_config"),
        on_new_request=("request",),
        get_num_new_matched_tokens=("request", "num_computed_tokens"),
        update_state_after_alloc=("request", "blocks", "num_external_tokens"),
        build_connector_meta=("scheduler_output",),
        update_connector_output=("connector_output",),
        request_finished=("request", "block_ids"),
        _get_remote_prefill_token_count=("num_prompt_tokens",),
        _stop_heartbeat=("req_id",),
        shutdown=(),
    ),
    *_attributes(
        f"{NIXL}.pull_scheduler",
        "NixlPullConnectorScheduler",
        "_reqs_in_batch",
        "_reqs_need_recv",
        "_reqs_need_send",
        "_reqs_not_processed",
        "_is_hma_required",
        "block_size",
        "decoder_kv_blocks_ttl",
        "is_bidirectional_kv_xfer_enabled",
        "kv_recompute_threshold",
        "side_channel_host",
        "side_channel_port",
        "transfer_tp_size",
        "use_host_buffer",
    ),
    *_methods(
        f"{NIXL}.pull_worker",
        "NixlPullConnectorWorker",
        __init__=("vllm_config", "engine_id", "kv_cache_config"),
        start_load_kv=("metadata",),
        _get_new_notifs=(),
        _pop_done_transfers=("transfers",),
    ),
    *_attributes(
        f"{NIXL}.pull_worker",
        "NixlPullConnectorWorker",
        "_recving_metadata",
        "_reqs_to_process",
        "_reqs_to_send",
        "consumer_notification_counts_by_req",
        "expected_consumer_notifications_by_req",
        "nixl_wrapper",
        "xfer_stats",
    ),
    *_methods(f"{NIXL}.connector", "NixlPullConnector", start_load_kv=("forward_context",)),
    *_methods(
        f"{NIXL}.connector", "NixlBaseConnector", __init__=("vllm_config", "role", "kv_cache_config"), shutdown=()
    ),
    *_methods(f"{NIXL}.stats", "NixlKVConnectorStats", reset=(), is_empty=()),
    *_methods(f"{NIXL}.stats", "NixlPromMetrics", observe=("transfer_stats_data", "engine_idx")),
    *_attributes("vllm.v1.request", "Request", "all_token_ids", "block_hashes", "num_in_flight_tokens"),
    *_attributes("vllm.v1.request", "Request", "skip_reading_prefix_cache"),
    *_attributes("vllm.v1.core.block_pool", "BlockPool", "hash_block_size"),
    *_methods("vllm.v1.core.block_pool", "BlockPool", get_num_free_blocks=()),
    *_methods(
        "vllm.v1.core.kv_cache_utils",
        "",
        generate_block_hash_extra_keys=("request", "start_token_idx", "end_token_idx", "start_mm_idx"),
    ),
    *_methods("vllm.v1.kv_cache_interface", "KVCacheSpec", prefix_replay_tokens=()),
    *_methods("vllm.v1.kv_cache_interface", "SlidingWindowSpec", extra_retained_tokens=()),
)

SINCE_033: tuple[Need, ...] = (
    # Without it in D's handles, P would read what D's memory held before D slept.
    *_attributes(f"{NIXL}.pull_scheduler", "NixlPullConnectorScheduler", "_registration_generation"),
)


def missing(release: tuple[int, int]) -> list[str]:
    """Names of what the installed vLLM, of this release, lacks."""
    needs = NEEDS if release < (0, 33) else NEEDS + SINCE_033
    return [name for need in needs if (name := need.missing()) is not None]


def check() -> None:
    """Raises `IncompatibleEngine` where vLLM is not a known one, or lacks something of the above."""
    from vllm import __version__ as version

    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = (int(numbers[1]), int(numbers[2])) if numbers is not None else None
    if release not in KNOWN:
        known = " and ".join(".".join(map(str, release)) for release in KNOWN)
        raise IncompatibleEngine(f"BackhaulConnector was made for vLLM {known}, and this is {version}: {WAY_OUT}")
    if lacking := missing(release):
        raise IncompatibleEngine(
            f"BackhaulConnector does not find {', '.join(lacking)} in this vLLM {version}: {WAY_OUT}"
        )


def check_hashes(algorithm: str) -> None:
    """A claim is proven by a block hash, which must be one that no one can forge."""
    if not algorithm.startswith("sha256"):
        raise IncompatibleEngine(
            f"BackhaulConnector compares prompts by their block hashes, and {algorithm} can be forged: start this engine"
            f" with --prefix-caching-hash-algo sha256 (vLLM's default), or {WAY_OUT}"
        )


if (
    __name__ == "__main__"
):  # in the engines' Python: what the connector would miss in a release that it does not know yet
    print(
        "the connector finds all that it needs" if not (found := missing(KNOWN[-1])) else f"missing: {', '.join(found)}"
    )
