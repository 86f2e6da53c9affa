"""vLLM tells a tool call that was cut off in one way in a stream and in another in a whole answer. The router adds no third: the
client gets what one engine alone would say, in the middle of a warm conversation too, and so does the turn that follows."""

from __future__ import annotations

from typing import Any

import pytest
from backhaul_router.report import Route
from router_turns import STORY, first_turn, run_cluster, user

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CUTS = {"before its name": 5, "in its name": 14, "before its arguments": 32, "in its arguments": 45, "not at all": 200}


@pytest.mark.parametrize("exact", [False, True], ids=["as sent", "exact histories"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("where", CUTS)
async def test_a_tool_call_that_is_cut_off_is_the_engines_own(where: str, stream: bool, exact: bool) -> None:
    tools: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required"}
    async with run_cluster(p={"prefix_caching": False}, exact_histories=exact) as cluster:
        history = await first_turn(cluster, tools | {"tool_choice": "none"})
        answer = await cluster.exact({"messages": history, **tools, "max_tokens": CUTS[where], "stream": stream})
        assert answer.reused.route is Route.WARM
        said: Any = answer.message if not stream else {"role": "assistant", "content": "Hm."}
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "ok"} for c in said.get("tool_calls", ())]
        following = [*history, said, *results, user("Go on. " + STORY)]
        assert (await cluster.exact({"messages": following, **tools})).reused.route is Route.WARM
