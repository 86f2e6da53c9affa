"""How requests are refused."""

from __future__ import annotations

from .engines import Engines, Json
from .shapes import HELLO


async def unknown_model_is_404(engines: Engines) -> None:
    answer = await engines.chat(engines.decode_url, HELLO, model="no-such-model")
    assert answer.status == 404
    assert answer.error == {
        "message": f"The model `no-such-model` does not exist. Valid aliases: {engines.model}.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }, answer.text


async def malformed_prompt_ids_are_400(engines: Engines) -> None:
    for ids in ([], "abc", [1, -2], [True, 3], [1.5]):
        answer = await engines.chat(engines.decode_url, HELLO, kv_transfer_params={"prompt_token_ids": ids})
        assert answer.status == 400, (ids, answer.text)
        assert answer.error["type"] == "BadRequestError"
        assert answer.error["param"] == "kv_transfer_params.prompt_token_ids", (ids, answer.text)


async def prompt_ids_outside_the_vocabulary_are_400(engines: Engines) -> None:
    answer = await engines.chat(engines.decode_url, HELLO, kv_transfer_params={"prompt_token_ids": [10**8]})
    assert answer.status == 400
    where = "kv_transfer_params.prompt_token_ids"
    assert answer.error["message"] == f"Token id {10**8} is out of vocabulary (parameter={where})", answer.text


async def fields_of_another_type_are_400_of_type_bad_request(engines: Engines) -> None:
    for fields in ({"max_tokens": "many"}, {"messages": "hello"}, {"kv_transfer_params": [1]}, {"stop": 3}):
        answer = await engines.chat(engines.decode_url, **{"messages": HELLO, **fields})
        assert answer.status == 400, (fields, answer.text)
        assert answer.error.keys() == {"message", "type", "param", "code"}
        assert (answer.error["type"], answer.error["code"]) == ("Bad Request", 400), (fields, answer.text)


async def broken_rules_are_400_of_type_bad_request_error(engines: Engines) -> None:
    for fields, param in (
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": []}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"continue_final_message": True, "add_generation_prompt": True}, None),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "a/b"}, "cache_salt"),
        ({"cache_salt": "s" * 129}, "cache_salt"),
        ({"n": 2, "temperature": 0}, None),
        ({"chat_template": "{{ messages }}"}, None),
    ):
        answer = await engines.chat(engines.decode_url, HELLO, **fields)
        assert answer.status == 400, (fields, answer.text)
        assert (answer.error["type"], answer.error["param"]) == ("BadRequestError", param), (fields, answer.text)


async def impossible_token_limits_are_400(engines: Engines) -> None:
    for fields in ({"max_tokens": 0}, {"max_tokens": 4, "min_tokens": 5}, {"max_tokens": -1}):
        answer = await engines.complete(engines.decode_url, "Once", **fields)
        assert answer.status == 400, (fields, answer.text)
        assert answer.error["type"] == "BadRequestError"


async def body_that_is_no_json_is_400(engines: Engines) -> None:
    answer = await engines.post(f"{engines.decode_url}/v1/chat/completions", b'{"messages": [')
    assert (answer.status, answer.error["type"]) == (400, "Bad Request")


async def body_of_another_content_type_is_400(engines: Engines) -> None:
    answer = await engines.post(f"{engines.decode_url}/v1/chat/completions", b"{}", Content_Type="text/plain")
    assert answer.status == 400


async def prompt_longer_than_the_context_is_400(engines: Engines) -> None:
    card = (await engines.get(f"{engines.decode_url}/v1/models")).json["data"][0]
    answer = await engines.complete(engines.decode_url, [40] * (card["max_model_len"] + 1))
    assert (answer.status, answer.error["type"]) == (400, "BadRequestError")


async def unknown_path_is_404(engines: Engines) -> None:
    answer = await engines.post(f"{engines.decode_url}/v1/nothing", {})
    assert answer.status == 404


async def unknown_fields_are_ignored(engines: Engines) -> None:
    answer = await engines.chat(engines.decode_url, HELLO, max_tokens=2, no_such_field={"a": 1})
    assert answer.status == 200


async def last_of_two_spellings_of_a_key_counts(engines: Engines) -> None:
    ids = list(range(40, 60))
    body = (
        b'{"model": "%s", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "return_token_ids": true,'
        b' "kv_transfer_params": {}, "kv_transfer_p\\u0061rams": {"prompt_token_ids": %s}}'
    ) % (engines.model.encode(), str(ids).encode())
    answer = await engines.post(f"{engines.decode_url}/v1/chat/completions", body)
    assert answer.json["prompt_token_ids"] == ids


async def transfer_parameters_smuggled_as_a_string_are_500(engines: Engines) -> None:
    smuggled: Json = {"kv_transfer_params": "x"}
    answer = await engines.chat(engines.decode_url, HELLO, max_tokens=2, vllm_xargs=smuggled)
    assert answer.status == 500
