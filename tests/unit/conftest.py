"""Property tests stay quick: a hundred examples, the same ones in every run, unless HYPOTHESIS_PROFILE names another profile."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("core_values", "turn_drive")

settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True, database=None)
settings.register_profile("long", max_examples=5_000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start interpreters of their own, to see them exit or fork, are left out of `make test-fast`."""
    for item in items:
        if item.path.stem in ("test_transport", "test_repository") and any(
            word in item.name for word in ("exit", "fork", "importing", "skips")
        ):
            item.add_marker(pytest.mark.slow)
