"""Options that several benches and the demo have."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Literal

from backhaul_cli.errors import CommandError
from backhaul_cli.options import NewFile
from backhaul_connector.launch.command import Connector

MovesKv = Annotated[Connector, "what moves KV: backhaul's own, or vLLM's"]


class OptionsError(CommandError):
    """The options cannot work together."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """Of a command whose figures can be kept."""

    json: Annotated[NewFile | None, "write the figures"] = None

    def write(self, figures: object) -> None:
        """Keeps them, if it is asked for."""
        if self.json is not None:
            self.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


@dataclass(frozen=True, kw_only=True)
class OnVllm(Written):
    """Of a command that starts vLLM engines."""

    model: Annotated[str, "DIR_OR_NAME", "of vLLM, as for `up`"] = "tiny"
    python: Annotated[str | None, "PATH", "the Python that has vLLM (default: this one)"] = None


@dataclass(frozen=True, kw_only=True)
class OnEngines(OnVllm):
    """Of a command that runs on engines of either kind."""

    engines: Annotated[
        Literal["loopback", "vllm"], "loopback: no model, times from a cost model; vllm: real ones, started here"
    ] = "loopback"
