"""Shared by the tests over loopback engines."""

import openai
import pytest

collect_ignore: list[str] = []
if openai.__version__.startswith("2."):
    # Other frameworks need openai 3.
    collect_ignore += ["test_frameworks.py", "test_framework_examples.py"]

pytest.register_assert_rewrite("router_turns")

WHOLE_PROGRAMS = (
    "test_bench",
    "test_bench_overhead",
    "test_conversation_programs",
    "test_conversations",
    "test_demo",
    "test_framework_examples",
    "test_left_behind",
    "test_operation_programs",
    "test_readme",
    "test_redis_ledger",
    "test_redis_router",
    "test_redis_rules",
    "test_replicas",
    "test_same_reports",
    "test_same_script",
    "test_scale",
    "test_sdk_end_to_end",
    "test_sdk_example",
    "test_sdk_passes_through",
    "test_sdk_remote",
    "test_server",
    "test_workers",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests start programs, or wait for what takes seconds, are left out of `make test-fast`."""
    for item in items:
        if item.path.stem in WHOLE_PROGRAMS:
            item.add_marker(pytest.mark.slow)
