"""Strategy of `/v1/completions`."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw

from .chat import Chat
from .endpoint import History
from .json_members import NULL, Members

_PIECE: Final = 256


class Completions(Chat):
    """Strategy of completions: a prompt in, choices out, as for chat otherwise."""

    numbered = False
    exact_histories = False
    tokenized = frozenset({"model", "prompt", "add_special_tokens"})
    tokenized_of_message = None
    operation = "text_completion"

    def history(self, members: Members) -> History:
        prompt = bytes(members.get("prompt", NULL))
        if prompt.startswith(b'"'):
            return History((prompt,), _pieces(prompt))
        try:
            ids = msgspec.json.decode(prompt, type=list[int])
        except msgspec.DecodeError:
            return History(odd="prompt")
        return History((prompt,), _pieces(prompt), tuple(ids)) if ids else History(odd="prompt")

    def put_ids(self, members: Members, params: Members, ids: Raw) -> None:
        members["prompt"] = ids


def _pieces(prompt: bytes) -> tuple[bytes, ...]:
    """A prompt without its closing quote or bracket, in whole pieces."""
    return tuple(prompt[i : i + _PIECE] for i in range(0, (len(prompt) - 1) // _PIECE * _PIECE, _PIECE))
