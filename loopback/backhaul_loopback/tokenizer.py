"""Byte tokenizer, without a vocabulary file: every UTF-8 byte is a token, and a few special ids mark turns and tools.

Text can never spell a special id, so what a user writes cannot open or close a turn.
"""

from __future__ import annotations

import codecs
import enum
from collections.abc import Iterable


class Special(enum.IntEnum):
    """Ids above the bytes. `END` ends a turn: it is the model's end-of-sequence token."""

    BOS = 256
    END = 257
    TURN = 258
    TOOLS = 259
    TOOL_CALL = 260
    TOOL_CALL_END = 261
    THINK = 262
    THINK_END = 263
    DOCUMENT = 264
    OPTIONS = 265
    IMAGE = 266


EOS = int(Special.END)
VOCAB_SIZE = 256 + len(Special)


def encode(text: str) -> list[int]:
    return list(text.encode("utf-8", "surrogatepass"))


def token_str(token: int) -> str:
    """How one token is shown: its byte as a Latin-1 character, or the special id's name."""
    return chr(token) if token < 256 else f"<|{Special(token).name.lower()}|>"


class Detokenizer:
    """Turns ids into text as they come; a character is given out when its last byte is there."""

    def __init__(self, *, skip_special_tokens: bool = True) -> None:
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Iterable[int]) -> str:
        pieces: list[str] = []
        for token in tokens:
            if token < 256:
                pieces.append(self._utf8.decode(bytes((token,))))
            elif not self._skip:
                pieces.append(token_str(token))
        return "".join(pieces)


def decode(tokens: Iterable[int], *, skip_special_tokens: bool = True) -> str:
    return Detokenizer(skip_special_tokens=skip_special_tokens).feed(tokens)
