"""What `backhaul bench overhead` does: the measurement, and what is written down of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated

from backhaul_cli.options import Numbers
from backhaul_connector.launch.command import Connector

from . import overhead, overhead_table, table
from .clusters import say
from .options import MovesKv, OptionsError, Written


@dataclass(frozen=True, kw_only=True)
class Options(Written):
    body_bytes: Annotated[Numbers, "of a request"] = (2_000, 200_000)
    concurrency: Annotated[Numbers, "turns at a time"] = (1, 32)
    turns: Annotated[int, "for each figure; large bodies get a quarter"] = 200
    connector: MovesKv = Connector.BACKHAUL

    def cases(self) -> list[overhead.Case]:
        """Raises `OptionsError`."""
        if self.turns < 1 or min(self.concurrency) < 1:
            raise OptionsError("--turns and --concurrency: 1 or more")
        for size in self.body_bytes:
            if not overhead.SIZES.start <= size < overhead.SIZES.stop:
                raise OptionsError(f"--body-bytes {size}: from {overhead.SIZES.start} to {overhead.SIZES.stop - 1}")
        return overhead.cases(self.body_bytes, self.concurrency, self.turns)


def main(options: Options) -> int:
    """Measures, and returns the exit status. Raises `OptionsError`, `OSError`, `overhead.NotWarm`."""
    ours = options.connector is Connector.BACKHAUL
    rows = asyncio.run(overhead.measure(options.cases(), say, ours=ours))
    out = table.console()
    out.print(overhead_table.table(rows, options.connector))
    for line in overhead_table.notes(rows):
        out.print(line)
    options.write(overhead_table.to_dict(rows, options.connector))
    return 0
