"""The endpoints of conversations: what is on record of them, their end, and what is kept for them."""

from __future__ import annotations

import math
from urllib.parse import parse_qs, unquote

from ..drive.router import Router
from ..errors import LeaseError
from ..identity.hints import MAX_PAUSE_S, checked_pause
from .answers import Message, Send, is_loopback, raw_path, send_error, send_json, start, withholding
from .conversation_log import Record
from .tenants import Tenant

CONVERSATIONS = "/backhaul/conversations"
MAX_WAIT_S = 5.0
_MOST_TURNS = 2**53
"""No conversation has so many."""


class ConversationEndpoints:
    """Of one application."""

    def __init__(self, router: Router, record: Record) -> None:
        self._router = router
        self.record = record

    async def answer(self, scope: Message, send: Send, tenant: Tenant | None = None) -> None:
        """To a client whose key was looked at."""
        here = is_loopback(scope.get("client"))
        if not here and tenant is not None:
            send = withholding(send, self._router.engine_urls)
        elif not here:
            await send_error(send, 403, "/backhaul answers to clients on the router's own machine only", "forbidden")
            return
        whose = tenant.name if tenant else ""
        method, path = scope["method"], raw_path(scope)
        _, found, name = path.partition(f"{CONVERSATIONS}/")
        of, _, verb = name.rpartition("/")
        if path == CONVERSATIONS and method == "GET":
            await send_json(send, 200, {"conversations": await self.record.listed(whose)})
        elif found and name and method == "GET":
            await self._show(unquote(name), parse_qs(scope.get("query_string", b"").decode("latin-1")), send, whose)
        elif found and name and method == "DELETE":
            await self._end(unquote(name), send, whose)
        elif of and verb in ("renew", "pause") and method == "POST":
            await self._keep(unquote(of), verb, parse_qs(scope.get("query_string", b"").decode("latin-1")), send, whose)
        elif path == CONVERSATIONS or (found and name):
            await send_error(send, 405, f"{method} is not for {path}", "method_not_allowed")
        else:
            await send_error(send, 404, f"{path} is not there; see {CONVERSATIONS}", "not_found")

    async def _show(self, conversation: str, query: dict[str, list[str]], send: Send, whose: str) -> None:
        try:
            turn = int(query["turn"][-1]) if "turn" in query else None
            wait_s = float(query.get("wait", ["0"])[-1])
            if not (turn is None or 1 <= turn <= _MOST_TURNS) or math.isnan(wait_s):
                raise ValueError
        except ValueError:
            rule = f"turn= takes a number from 1 to {_MOST_TURNS}, and wait= a number of seconds"
            await send_error(send, 400, rule, "malformed_query")
            return
        wait_s = min(max(wait_s, 0.0), MAX_WAIT_S)
        shown = await self.record.shown(whose, conversation, turn, wait_s)
        if shown is None:
            await _send_unknown(send, conversation)
            return
        await send_json(send, 200, shown)

    async def _keep(self, conversation: str, verb: str, query: dict[str, list[str]], send: Send, whose: str) -> None:
        """`renew` and `pause`. What is not on record has nothing that could be kept, which the answers say."""
        name = "ttl_s" if verb == "renew" else "seconds"
        try:
            given = checked_pause(float(query[name][-1])) if name in query or verb == "pause" else None
        except (KeyError, ValueError):
            rule = f"{name}= takes a number of seconds above 0 and at most {MAX_PAUSE_S:,.0f}"
            await send_error(send, 400, rule, "malformed_query")
            return
        try:
            if verb == "pause" and given is not None:
                await send_json(send, 200, await self._router.pause(conversation, given, whose))
            else:
                await send_json(send, 200, {"remaining_s": await self._router.renew(conversation, given, whose)})
        except LeaseError as error:
            await send_error(send, 502, str(error), "lease_failed")

    async def _end(self, conversation: str, send: Send, whose: str) -> None:
        known = await self.record.forget(whose, conversation)
        await self._router.end_conversation(conversation, whose)
        if known:
            await send(start(204, []))
            await send({"type": "http.response.body", "body": b""})
        else:
            await _send_unknown(send, conversation)


async def _send_unknown(send: Send, conversation: str) -> None:
    await send_error(send, 404, f"no conversation {conversation!r} is on record here", "unknown_conversation")
