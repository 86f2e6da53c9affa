"""Shared by the tests over loopback engines."""

import pytest

pytest.register_assert_rewrite("router_turns")
