"""Validation bounds of what may stand in a message. They are checked where one is read, not where it is made."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

LONGEST_S: Final = 7 * 24 * 3600.0

Count = Annotated[int, Meta(ge=0)]
Epoch = Annotated[str, Meta(max_length=64)]
Hash = Annotated[str, Meta(max_length=128)]
Name = Annotated[str, Meta(min_length=1, max_length=1024)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=LONGEST_S)]
Size = Annotated[int, Meta(ge=1, le=4096)]
