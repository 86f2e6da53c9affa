"""Processes that take at once: `python redis_takers.py URL PROCESSES TAKES`. Each takes the handle of conversation `c` so many
times, and says on a line how often it got it and how often it was in use."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
from multiprocessing.synchronize import Barrier

from backhaul_router.ledger import digests
from backhaul_router.ledger.records import Key
from backhaul_router.ledger.redis_ledger import RedisLedger
from backhaul_router.report import Reason

KEY = Key("", "m", "", "c")


async def take(url: str, takes: int, all_are_ready: Barrier) -> None:
    ledger = RedisLedger(url, timeout_s=60.0)
    await ledger.find(KEY, b"")  # connects
    all_are_ready.wait()
    chain = digests.chain([b"a", b"b"])
    taken = await asyncio.gather(*(ledger.take(KEY, chain, 0.0, lambda _: None) for _ in range(takes)))
    await ledger.aclose()
    got = sum(one.held is not None for one in taken)
    print(got, sum(one.reason is Reason.IN_USE for one in taken), flush=True)


def run(url: str, takes: int, all_are_ready: Barrier) -> None:
    asyncio.run(take(url, takes, all_are_ready))


def main(url: str, processes: int, takes: int) -> None:
    fork = multiprocessing.get_context("fork")
    all_are_ready = fork.Barrier(processes, timeout=30)
    started = [fork.Process(target=run, args=(url, takes, all_are_ready)) for _ in range(processes)]
    for process in started:
        process.start()
    for process in started:
        process.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
