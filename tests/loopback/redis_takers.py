"""A process that takes: `python redis_takers.py URL TAKES`. It says `ready`, waits for a line, takes the handle of conversation
`c` so many times at once, and says how often it got it and how often it was in use."""

from __future__ import annotations

import asyncio
import sys

from backhaul_router import digests
from backhaul_router.ledger import Key
from backhaul_router.redis_ledger import RedisLedger
from backhaul_router.report import Reason

KEY = Key("", "m", "", "c")


async def main(url: str, takes: int) -> None:
    ledger = RedisLedger(url, timeout_s=60.0)
    await ledger.find(KEY, b"")  # connects
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    chain = digests.chain([b"a", b"b"])
    taken = await asyncio.gather(*(ledger.take(KEY, chain, 0.0, lambda _: None) for _ in range(takes)))
    got = sum(one.held is not None for one in taken)
    print(got, sum(one.reason is Reason.IN_USE for one in taken), flush=True)
    await ledger.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
