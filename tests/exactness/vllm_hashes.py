"""What vLLM's block hashes cover besides token ids: the connector's proof rests on it. Runs in vLLM's Python, without engines:
`python vllm_hashes.py`."""

from __future__ import annotations

import unittest
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

BLOCK = 16
PROMPT = list(range(1000, 1000 + 6 * BLOCK))
IMAGE = PlaceholderRange(offset=2 * BLOCK + 3, length=2 * BLOCK)


def hashes(**fields: Any) -> list[bytes]:
    """Of the prompt's six blocks."""
    request = Request(
        request_id="r",
        prompt_token_ids=list(PROMPT),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
        **fields,
    )
    return list(request.block_hashes)


def image(name: str) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=IMAGE)


def adapter(name: str, path: str = "/adapters/one", **fields: Any) -> LoRARequest:
    return LoRARequest(lora_name=name, lora_int_id=1, lora_path=path, **fields)


def common(ours: list[bytes], theirs: list[bytes]) -> int:
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


class BlockHashes(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        init_none_hash(sha256)

    def test_equal_requests_have_equal_hashes_of_32_bytes(self) -> None:
        assert hashes() == hashes()
        assert {len(one) for one in hashes()} == {32}
        assert len(set(hashes())) == 6

    def test_an_image_swapped_behind_the_same_placeholder_differs_from_its_first_block_on(self) -> None:
        assert common(hashes(mm_features=[image("a")]), hashes(mm_features=[image("b")])) == 2
        assert common(hashes(mm_features=[image("a")]), hashes(mm_features=[image("a")])) == 6

    def test_an_image_in_place_of_plain_tokens_differs_from_its_first_block_on(self) -> None:
        assert common(hashes(mm_features=[image("a")]), hashes()) == 2

    def test_another_adapter_name_differs_from_the_first_block_on(self) -> None:
        assert common(hashes(lora_request=adapter("one")), hashes(lora_request=adapter("two"))) == 0
        assert common(hashes(lora_request=adapter("one")), hashes()) == 0

    def test_a_name_that_was_pointed_at_another_adapter_differs_from_the_first_block_on(self) -> None:
        before, after = adapter("one"), adapter("one", "/adapters/two")
        assert common(hashes(lora_request=before), hashes(lora_request=after)) == 0

    def test_an_adapter_whose_files_changed_in_place_does_not_show(self) -> None:
        """Which is why whoever reloads weights or adapters in place has to flush."""
        before, after = adapter("one"), adapter("one", load_inplace=True)
        assert common(hashes(lora_request=before), hashes(lora_request=after)) == 6

    def test_another_cache_salt_differs_from_the_first_block_on(self) -> None:
        assert common(hashes(cache_salt="a"), hashes(cache_salt="b")) == 0
        assert common(hashes(cache_salt="a"), hashes()) == 0


if __name__ == "__main__":
    unittest.main()
