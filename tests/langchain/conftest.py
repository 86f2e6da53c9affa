"""Shared by the tests of the LangChain model."""

import openai
import pytest

collect_ignore: list[str] = []
if openai.__version__.startswith("2."):
    # The environment with openai 2 has LangChain's core only: what agents and graphs need is on openai 3.
    collect_ignore += ["test_langgraph.py", "test_langchain_examples.py", "test_langchain_page.py"]

NOT_OURS = ("test_pdf_inputs", "test_pdf_tool_message", "test_stream_time")
"""Standard tests that would be skipped: vLLM takes no PDF files, and recorded answers are for services that cost money."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if item.path.stem == "test_standard" and item.name in NOT_OURS]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
