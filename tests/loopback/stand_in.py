"""Stands in for the Python that has vLLM: what `backhaul up` and `--engines vllm` start with it are loopback engines.

As vLLM does, such an engine has a process beside it in a session of its own, and leaves a socket behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

from backhaul_loopback import EngineConfig, LoopbackEngine
from backhaul_loopback.__main__ import serve

INSTALLED = {"vllm": "0.33.0", "torch": "2.11.0+cpu", "nixl": "1.5.1", "plugin": True}


def make(folder: Path, building: Path | None = None) -> Path:
    """Writes the program that can be named with `--python`. With `building`, a model takes forever to build, and that file
    shows that it has begun."""
    path = folder / "python"
    forever = f'case "$1" in *models.py) touch "{building}"; exec sleep 600;; esac\n' if building else ""
    path.write_text(f'#!/bin/sh\n{forever}exec "{sys.executable}" "{__file__}" "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def config(argv: list[str]) -> EngineConfig:
    """What vLLM's flags mean for a loopback engine."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model")
    parser.add_argument("--served-model-name")
    parser.add_argument("--port", type=int)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--no-enable-prefix-caching", dest="prefix_caching", action="store_false")
    parser.add_argument("--kv-transfer-config", type=json.loads)
    flags, _ = parser.parse_known_args(argv)
    extra = flags.kv_transfer_config["kv_connector_extra_config"]
    return EngineConfig(
        role="prefill" if flags.kv_transfer_config["kv_role"] == "kv_producer" else "decode",
        model=flags.served_model_name or flags.model,
        port=flags.port,
        side_channel_port=int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]),
        block_size=flags.block_size,
        prefix_caching=flags.prefix_caching,
        kv_recompute_threshold=extra["kv_recompute_threshold"],
        decoder_kv_blocks_ttl=extra["decoder_kv_blocks_ttl"],
    )


def run_engine(settings: EngineConfig) -> None:
    folder = os.environ.get("VLLM_RPC_BASE_PATH", tempfile.gettempdir())
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(f"{folder}/{uuid.uuid4()}")
    engine = LoopbackEngine(**{name: getattr(settings, name) for name in settings.__dataclass_fields__})
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as core:
        try:
            asyncio.run(serve(engine))
        finally:
            core.kill()


def main(argv: list[str]) -> None:
    match argv:
        case ["-c", _]:
            print(json.dumps(INSTALLED))
        case ["-m", "vllm.entrypoints.openai.api_server", *flags]:
            run_engine(config(flags))
        case [builder, _, model] if builder.endswith("models.py"):
            Path(model).mkdir()
        case _:
            raise SystemExit(f"not expected: {argv}")


if __name__ == "__main__":
    main(sys.argv[1:])
