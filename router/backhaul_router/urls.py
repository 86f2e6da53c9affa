"""Parsing and redaction of URLs as they are given: what is none, and what of one may be shown.

Python's own functions raise `ValueError` for some that are none, some of them only when a part is asked for, and take others.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import SplitResult, urlsplit

_AT: Final = re.compile(r"(\[[^\[\]]+\]|[^\[\]:\s\x00-\x1f\x7f]*)(:[0-9]*)?")
"""Host and port; an IPv6 address is in brackets."""
_SCHEME: Final = re.compile(r"[A-Za-z0-9+.-]*://")


def split(url: str) -> SplitResult | None:
    """The parts, whose `hostname` and `port` can be asked for, if perhaps not there. `None` for what is no URL: an IPv6 address
    without its brackets, a port that is no number, a space in the host."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - it is read here, and not before
    except ValueError:
        return None
    return parts if _AT.fullmatch(parts.netloc.rpartition("@")[2]) else None


def shown(url: str) -> str:
    """Without credentials and query, for messages; also of what is no URL: what stands before the last `@` may be a password."""
    scheme = match[0] if (match := _SCHEME.match(url)) else ""
    rest = url[len(scheme) :].rpartition("@")[2]
    return scheme + re.split("[?#]", rest, maxsplit=1)[0]
