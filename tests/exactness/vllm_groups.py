"""What the connector makes of vLLM's KV cache groups, held against vLLM's own classes: specs, requests, block manager and
connector. Runs in vLLM's Python, without engines: `python vllm_groups.py`."""

from __future__ import annotations

import itertools
import unittest
from types import SimpleNamespace
from typing import Any

import torch
from backhaul_connector import cache_groups
from backhaul_connector.handles import Handle
from backhaul_connector.shape import Shape
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import Request

BLOCK = 16
HEADS: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(**HEADS)


def windowed(tokens: int, **other: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(**HEADS, sliding_window=tokens, **other)


def request(ids: list[int], name: str = "r", **fields: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=list(ids),
        sampling_params=SamplingParams(max_tokens=500),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
        **fields,
    )


def shape(*windows: int) -> Shape:
    return Shape(BLOCK, max(1, len(windows)), [1], 0, True, None, windows=windows, extra_keys=cache_groups.extra_keys)


class Groups(unittest.TestCase):
    def test_groups_that_keep_all_can_be_cut(self) -> None:
        mla = MLAAttentionSpec(**HEADS)
        several = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"a": mla, "b": mla})
        assert cache_groups.windows([FULL, mla, several], BLOCK) == ()

    def test_a_sliding_window_makes_a_read_whole(self) -> None:
        assert cache_groups.windows([FULL, windowed(64)], BLOCK) == (0, 64)
        assert cache_groups.windows([windowed(64)], BLOCK) == (64,)

    def test_what_keeps_kv_in_another_way_is_named(self) -> None:
        mamba = MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,))
        chunked = ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=64)
        inner = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"a": windowed(64), "b": windowed(64)})
        for spec, name in (
            (mamba, "state-space"),
            (chunked, "ChunkedLocalAttentionSpec"),
            (RSWASpec(**HEADS, rswa_window=64), "RSWASpec"),
            (windowed(64, extra_retained_tokens=2), "SlidingWindowSpec"),
            (FullAttentionSpec(**HEADS, non_causal=True), "FullAttentionSpec"),
            (inner, "UniformTypeKVCacheSpecs"),
            (FullAttentionSpec(**{**HEADS, "block_size": 2 * BLOCK}), "differ in block size"),
        ):
            found = cache_groups.windows([FULL, spec], BLOCK)
            assert isinstance(found, str), spec
            assert name in found, found


class Tails(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        init_none_hash(sha256)

    def test_all_that_a_block_hash_covers_is_in_it_below_one_block_too(self) -> None:
        def image(name: str, offset: int) -> list[MultiModalFeatureSpec]:
            place = PlaceholderRange(offset=offset, length=3)
            return [MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=place)]

        for length in (10, 3 * BLOCK + 10):
            ids, at = list(range(1000, 1000 + length)), length - 5
            made = [
                {},
                {"cache_salt": "a"},
                {"cache_salt": "b"},
                {"lora_request": LoRARequest(lora_name="a", lora_int_id=1, lora_path="/one")},
                {"lora_request": LoRARequest(lora_name="a", lora_int_id=1, lora_path="/two")},
                {"mm_features": image("x", at)},
                {"mm_features": image("y", at)},
                {"mm_features": image("x", at - 1)},
            ]
            found = [shape().tail_hash(request(ids, **fields), length) for fields in made]
            found += [shape().tail_hash(request([*ids[:-1], 5]), length), shape().tail_hash(request(ids), length - 1)]
            assert len(set(found)) == len(found)
            assert [shape().tail_hash(request(ids, **fields), length) for fields in made] == found[: len(made)]

    def test_the_prompt_that_goes_on_has_the_tail_of_the_turn_that_generated_it(self) -> None:
        for length, generated in itertools.product((10, 40, 48), (1, 7, 30)):
            ran = request(list(range(1000, 1000 + length)), cache_salt="s")
            ran.append_output_token_ids(list(range(5, 5 + generated)))
            tokens = length + generated - 1
            prompt = request([*ran.all_token_ids, 77, 78, 79], cache_salt="s")
            assert shape().tail_hash(ran, tokens) == shape().tail_hash(prompt, tokens) is not None


class Manager:
    """One engine's blocks, and what the NIXL connector sends of them."""

    def __init__(self, *windows: int) -> None:
        specs = [windowed(tokens) if tokens else FULL for tokens in windows]
        self.config = KVCacheConfig(
            num_blocks=500,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)],
        )
        self.blocks = KVCacheManager(
            self.config, max_model_len=4096, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=True
        )
        self._nixl: Any = SimpleNamespace(
            kv_cache_config=self.config,
            _is_hma_required=any(windows),
            blocks_per_sw=[-(-tokens // BLOCK) + 1 if tokens else 0 for tokens in windows],
            _ssm_spec_blocks=[None] * len(windows),
        )

    def clipped(self, lists: Any) -> Any:
        return NixlBaseConnectorScheduler.get_exchange_clipped_blocks(self._nixl, lists)

    def run(self, one: Request, answer: int) -> None:
        """Prefills, then decodes token by token, as the scheduler does; the last token is not run."""
        hit, computed = self.blocks.get_computed_blocks(one)[:2]
        new = one.num_tokens - computed
        assert self.blocks.allocate_slots(one, new, computed, hit) is not None
        one.num_computed_tokens = one.num_tokens
        for token in range(answer - 1):
            one.append_output_token_ids([token + 3])
            assert self.blocks.allocate_slots(one, 1) is not None
            one.num_computed_tokens += 1
        one.append_output_token_ids([2])

    def kept(self, one: Request, in_flight: int) -> Handle:
        """The handle of a request that has finished with steps in flight."""
        for _ in range(in_flight):
            one.num_in_flight_tokens += 1
            assert self.blocks.allocate_slots(one, 1) is not None
            one.num_computed_tokens += 1
        self.blocks.remove_skipped_blocks(one.request_id, one.num_computed_tokens - one.num_in_flight_tokens)
        lists = self.blocks.get_block_ids_for_computed_tokens(one.request_id, one.num_computed_tokens)
        tokens = one.num_computed_tokens
        return Handle([list(group) for group in self.clipped(lists)], "e", "r", "h", 1, remote_num_tokens=tokens)

    def takes(self, prompt: Request, tokens: int) -> list[list[int]]:
        """The blocks that the first `tokens` tokens of a prompt are read into."""
        hit, computed = self.blocks.get_computed_blocks(prompt)[:2]
        blocks = self.blocks.allocate_slots(
            prompt, 0, computed, hit, num_external_computed_tokens=tokens - computed, delay_cache_blocks=True
        )
        assert blocks is not None
        got = self.blocks.get_blocks(prompt.request_id)
        return list(self.clipped(got.get_unhashed_block_ids_all_groups()))


class Reads(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        init_none_hash(sha256)

    def test_what_is_published_is_what_the_reader_pairs_its_own_blocks_with(self) -> None:
        lengths = (20, 63, 64, 65, 100, 150)
        for windows in ((0, 64), (0, 40), (33,), (16, 0)):
            for length, answer, in_flight in itertools.product(lengths, (1, 2, 17), (0, 1)):
                d, p, mine = Manager(*windows), Manager(*windows), shape(*windows)
                ran = request(list(range(1000, 1000 + length)), "d")
                d.run(ran, answer)
                tokens = length + answer - 1
                lists = mine.cut(d.kept(ran, in_flight), tokens)
                assert lists is not None, (windows, length, answer, in_flight)
                owned = d.blocks.get_block_ids("d")
                for group, ids in enumerate(lists):
                    first = mine.first_needed(group, tokens)
                    assert ids == list(owned[group][first : -(-tokens // BLOCK)])
                    assert 0 not in ids
                prompt = request([*ran.all_token_ids, *range(50, 90)], "p")
                local = p.takes(prompt, tokens)
                assert mine.is_exactly(lists, tokens)
                assert [len(ids) for ids in local] == [len(ids) for ids in lists], (windows, length, answer)

    def test_a_reader_that_has_the_beginning_itself_pairs_the_end(self) -> None:
        windows = (0, 64)
        d, p, mine = Manager(*windows), Manager(*windows), shape(*windows)
        ran, before = request(list(range(1000, 1100)), "d"), request(list(range(1000, 1080)), "p0")
        d.run(ran, 60)
        p.run(before, 1)
        p.blocks.cache_blocks(before, 80)
        p.blocks.free(before)
        lists = mine.cut(d.kept(ran, 0), 159)
        assert lists is not None
        local = p.takes(request([*ran.all_token_ids, 7, 8, 9], "p"), 159)
        assert [len(ids) for ids in local] == [5, 4]
        assert [len(ids) for ids in lists] == [10, 4]


if __name__ == "__main__":
    unittest.main()
