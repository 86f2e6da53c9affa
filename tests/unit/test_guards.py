"""The page of faults and guards names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guards.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


def functions_of(path: Path) -> set[str]:
    functions = (
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {function.name for function in functions}


@pytest.mark.parametrize("path", sorted({path for path, _ in NAMED}))
def test_every_test_that_the_page_names_exists(path: str) -> None:
    there = functions_of(ROOT / path)
    assert [name for of, name in NAMED if of == path and name not in there] == []


def test_every_row_of_a_fault_names_a_test() -> None:
    tables = PAGE.partition("## Wrong tokens")[2].partition("## What is not guarded")[0]
    rows = [line for line in tables.splitlines() if line.startswith("| ") and not line.startswith("| the fault")]
    assert len(rows) > 40
    assert [row for row in rows if "::test_" not in row] == []
    assert tables.count("tests/") == len(NAMED)
