"""Which fields answers have, and what the engines say about themselves."""

from __future__ import annotations

from .engines import Engines

HELLO = [{"role": "user", "content": "Say something short."}]

CHAT = {
    "id",
    "object",
    "created",
    "model",
    "choices",
    "service_tier",
    "system_fingerprint",
    "usage",
    "prompt_logprobs",
    "prompt_token_ids",
    "prompt_text",
    "kv_transfer_params",
    "ec_transfer_params",
    "metrics",
}
CHAT_CHOICE = {"index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts"}
MESSAGE = {"role", "content", "refusal", "annotations", "audio", "function_call", "reasoning"}
COMPLETION = CHAT - {"prompt_logprobs", "prompt_token_ids", "prompt_text"}
COMPLETION_CHOICE = {
    "index",
    "text",
    "logprobs",
    "finish_reason",
    "stop_reason",
    "token_ids",
    "prompt_logprobs",
    "prompt_token_ids",
    "routed_experts",
}
USAGE = {"prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details", "completion_tokens_details"}
DETAILS = {"cached_tokens", "created_cache_tokens", "multimodal_tokens"}

METRICS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:prompt_tokens_by_source_total",
    "vllm:prompt_tokens_cached_by_source_total",
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
    "vllm:request_success_total",
    "vllm:engine_sleep_state",
    "vllm:time_to_first_token_seconds_count",
    "vllm:nixl_xfer_time_seconds_count",
    "vllm:nixl_bytes_transferred_sum",
    "vllm:nixl_bytes_transferred_count",
    "vllm:nixl_num_failed_transfers_total",
    "vllm:nixl_num_failed_notifications_total",
    "vllm:nixl_num_kv_expired_reqs_total",
    "vllm:nixl_num_notifications_after_expiry_total",
    "vllm:cache_config_info",
)


async def version_is_of_the_release_that_the_protocol_is_known_of(engines: Engines) -> None:
    for url in (engines.prefill_url, engines.decode_url):
        answer = await engines.get(f"{url}/version")
        assert answer.json["version"].startswith(("0.32", "0.33")), answer.text


async def health_has_no_body(engines: Engines) -> None:
    answer = await engines.get(f"{engines.decode_url}/health")
    assert (answer.status, answer.text) == (200, "")


async def models_lists_the_served_model_with_its_context_length(engines: Engines) -> None:
    answer = await engines.get(f"{engines.prefill_url}/v1/models")
    (card,) = answer.json["data"]
    assert answer.json["object"] == "list"
    assert {"id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"} == card.keys()
    assert (card["id"], card["parent"], card["owned_by"]) == (engines.model, None, "vllm")
    assert card["max_model_len"] > 1000


async def metrics_name_what_a_router_reads(engines: Engines) -> None:
    for url in (engines.prefill_url, engines.decode_url):
        page = (await engines.get(f"{url}/metrics")).text
        missing = [name for name in METRICS if f"\n{name}{{" not in page]
        assert not missing, f"{url} lacks {missing}"
        assert "\nprocess_start_time_seconds " in page, f"{url} does not say when it began"
    assert await engines.block_size() >= 1


async def chat_answer_has_all_of_vllms_fields(engines: Engines) -> None:
    answer = await engines.chat(engines.decode_url, HELLO, max_tokens=8)
    body = answer.json
    assert answer.status == 200
    assert body.keys() == CHAT
    assert body["choices"][0].keys() == CHAT_CHOICE | _since_033(engines)
    assert body["choices"][0]["message"].keys() - {"tool_calls"} == MESSAGE
    assert body["usage"].keys() == USAGE
    assert body["usage"]["prompt_tokens_details"].keys() == DETAILS
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["kv_transfer_params"] is None


async def completion_answer_has_all_of_vllms_fields(engines: Engines) -> None:
    answer = await engines.complete(engines.decode_url, "Once upon a time", max_tokens=8)
    body = answer.json
    assert answer.status == 200
    assert body.keys() == COMPLETION
    assert body["choices"][0].keys() == COMPLETION_CHOICE | _since_033(engines)
    assert body["usage"].keys() == USAGE
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")


async def completions_default_to_sixteen_tokens(engines: Engines) -> None:
    answer = await engines.complete(engines.decode_url, "Once upon a time", ignore_eos=True)
    assert answer.usage["completion_tokens"] == 16
    assert answer.choice["finish_reason"] == "length"


async def max_tokens_ends_an_answer_with_reason_length(engines: Engines) -> None:
    answer = await engines.chat(
        engines.decode_url, HELLO, max_tokens=5, ignore_eos=True, return_token_ids=True, max_completion_tokens=7
    )
    assert answer.choice["finish_reason"] == "length"
    assert len(answer.choice["token_ids"]) == answer.usage["completion_tokens"] == 7, "max_completion_tokens wins"
    usage = answer.usage
    assert usage["total_tokens"] == usage["prompt_tokens"] + 7 == len(answer.json["prompt_token_ids"]) + 7


async def stop_token_ends_an_answer_and_is_counted(engines: Engines) -> None:
    first = await engines.chat(engines.decode_url, HELLO, max_tokens=12, ignore_eos=True, return_token_ids=True)
    ids = first.choice["token_ids"]
    stop = ids[5]
    answer = await engines.chat(
        engines.decode_url, HELLO, max_tokens=12, ignore_eos=True, return_token_ids=True, stop_token_ids=[stop]
    )
    expected = ids[: ids.index(stop) + 1]
    assert answer.choice["token_ids"] == expected
    assert (answer.choice["finish_reason"], answer.choice["stop_reason"]) == ("stop", stop)
    assert answer.usage["completion_tokens"] == len(expected)


async def n_gives_as_many_choices(engines: Engines) -> None:
    answer = await engines.chat(engines.decode_url, HELLO, n=2, max_tokens=4, ignore_eos=True, temperature=1, seed=1)
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1]
    assert answer.usage["completion_tokens"] == 8


async def logprobs_come_per_generated_token(engines: Engines) -> None:
    chat = await engines.chat(engines.decode_url, HELLO, max_tokens=3, ignore_eos=True, logprobs=True, top_logprobs=1)
    content = chat.choice["logprobs"]["content"]
    assert len(content) == 3
    assert all(entry.keys() == {"token", "logprob", "bytes", "top_logprobs"} for entry in content)
    plain = await engines.complete(engines.decode_url, "Once", max_tokens=3, ignore_eos=True, logprobs=1)
    logprobs = plain.choice["logprobs"]
    assert logprobs.keys() == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    assert all(len(values) == 3 for values in logprobs.values())


async def echo_puts_the_prompt_before_the_completion(engines: Engines) -> None:
    answer = await engines.complete(engines.decode_url, "Once upon a time", max_tokens=4, echo=True)
    assert answer.choice["text"].startswith("Once upon a time")


async def request_id_header_names_the_answer_and_the_handle(engines: Engines) -> None:
    prompt = list(range(40, 100))
    body = engines.body(prompt=prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    answer = await engines.post(f"{engines.prefill_url}/v1/completions", body, X_Request_Id="abc")
    assert answer.json["id"] == "cmpl-abc"
    assert answer.handle["remote_request_id"].startswith("cmpl-abc-0-")
    await engines.decode_and_drop(prompt, answer.handle)


def _since_033(engines: Engines) -> set[str]:
    return {"weight_versions"} if engines.speaks_033 else set()
