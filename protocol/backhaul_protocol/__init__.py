"""The wire protocol of router, prefill engine (P) and decode engine (D): message types, and the closed list of reasons.

Its words, each with one meaning:

    handle   vLLM's `kv_transfer_params`: where an engine keeps a request's KV blocks
    lease    D's promise to keep a handle's blocks until a time; it can be renewed and released
    claim    P's question to D's scheduler, just before it reads
    hold     D keeping a claim's blocks until P is done with them

What is said in requests and answers is one object, under `KEY` in `kv_transfer_params`; claims go over the lease channel. Its
`version` decides: another one is refused, and what is not understood of this one is an error that is told. Times are relative
seconds, since no clock of another machine is compared with one's own.
"""

from __future__ import annotations

from typing import Final

KEY: Final = "backhaul"
"""The one key of ours in `kv_transfer_params`."""
VERSION: Final = 1
