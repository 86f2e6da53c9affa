"""Addressing of data-parallel ranks as engines of their own: `http://d1:8200#dp=1`.

Ranks of one vLLM server share its address, and nothing else: each has its scheduler, its KV cache and its leases. To a router
such a spelling is an engine's URL like any other, and so the key of everything that it knows of the rank. The HTTP client sends
requests to the address with `X-data-parallel-rank`, which vLLM's front end goes by, and of the server's one `/metrics` page the
other ranks' lines are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

HEADER: Final = "X-data-parallel-rank"
_SPELLING: Final = re.compile(r"#dp=(\d{1,4})")


def split(url: str) -> tuple[str, str | None]:
    """The URL without the rank, and the rank; also where a path follows."""
    found = _SPELLING.search(url)
    return (url, None) if found is None else (url[: found.start()] + url[found.end() :], str(int(found[1])))


def listed_twice(urls: Iterable[str]) -> set[str]:
    """Servers that are there as one engine and by rank too."""
    urls = tuple(urls)
    return set(urls) & {split(url)[0] for url in urls if split(url)[1] is not None}
