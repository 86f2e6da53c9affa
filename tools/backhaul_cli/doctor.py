"""`backhaul doctor`: a small exchange over each pair of engines, and what came of it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from backhaul_router.config import RouterConfig
from backhaul_router.engines import doctor
from backhaul_router.serve.options import engine_api_key

from .options import NewFile

EPILOG = (
    "Exit status: 0 all good, 1 works with warnings, 2 unsafe or unusable, 3 an engine does not answer; the highest that "
    "applies. The engines' API key comes from BACKHAUL_ENGINE_API_KEY."
)
_SEVERAL = {"action": "extend", "nargs": "+"}


@dataclass(frozen=True, kw_only=True)
class Options:
    prefill: Annotated[list[str], "URL", "base URLs of the engines", str, _SEVERAL]
    decode: Annotated[list[str], "URL", "base URLs of the engines", str, _SEVERAL]
    json: Annotated[NewFile | None, "write the diagnosis as JSON; - prints it instead of the table"] = None
    timeout: Annotated[float, "limit of each request"] = 10.0
    kv_recompute_threshold: Annotated[int, "TOKENS", "what the engines were started with"] = 64


def main(options: Options) -> int:
    """Says what is found, and returns how severe the worst of it is. Raises `ConfigError`."""
    config = RouterConfig(
        prefill=tuple(options.prefill),
        decode=tuple(options.decode),
        prefill_timeout_s=options.timeout,
        kv_recompute_threshold=options.kv_recompute_threshold,
        api_key=engine_api_key(),
    )
    diagnosis = asyncio.run(
        doctor.diagnose(
            config.prefill,
            config.decode,
            timeout_s=options.timeout,
            threshold=config.kv_recompute_threshold,
            api_key=config.api_key,
        )
    )
    text = json.dumps(diagnosis.to_dict(), indent=2)
    to_stdout = options.json == Path("-")
    print(text if to_stdout else doctor.table(diagnosis))
    if options.json is not None and not to_stdout:
        options.json.write_text(text + "\n")
    return int(diagnosis.severity)
