"""docs/architecture.md says what the tree is: its tables are made of the modules' own first sentences."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest
from test_repository import FACE, MAY_IMPORT, PACKAGES, ROOMS, TOOLS

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
ROUTER = PACKAGES["backhaul_router"]
ROOMS_PART = re.compile(r"(?<=<!-- rooms -->\n).*(?=<!-- /rooms -->)", re.DOTALL)


def first_sentence(module: Path) -> str:
    """Of a module's docstring, as one line."""
    paragraph = (ast.get_docstring(ast.parse(module.read_text())) or "").split("\n\n")[0]
    return re.split(r"(?<=[.])\s", " ".join(paragraph.split()), maxsplit=1)[0].removesuffix(".")


def modules_of(room: str) -> list[Path]:
    face = {name.rpartition(".")[2] for name in FACE} if not room else set()
    return sorted(path for path in (ROUTER / room).glob("*.py") if path.stem not in {"__init__", *face})


def rooms_part() -> str:
    out = []
    for room in ("", *ROOMS):
        title = f"`{room}`" if room else "The root"
        said = first_sentence(ROUTER / room / "__init__.py") if room else "Values and errors that every room may use"
        rows = [f"| `{path.stem}` | {first_sentence(path).replace('|', chr(92) + '|')} |" for path in modules_of(room)]
        out += [f"### {title}", "", f"{said}.", "", "| module | what |", "|---|---|", *rows, ""]
    return "\n" + "\n".join(out)


def test_the_page_says_of_every_module_what_its_own_first_sentence_says():
    if os.environ.get("BACKHAUL_WRITE_DOCS") == "1":
        PAGE.write_text(ROOMS_PART.sub(lambda _: rooms_part(), PAGE.read_text()))
    shown = ROOMS_PART.search(PAGE.read_text())
    assert shown is not None
    assert shown[0] == rooms_part()


@pytest.mark.parametrize("module", [path for room in ("", *ROOMS) for path in modules_of(room)], ids=str)
def test_every_module_says_what_it_is_before_anything_else(module):
    assert len(first_sentence(module)) > 20


def test_every_package_is_on_the_page_with_what_it_may_import():
    rows = dict(re.findall(r"^\| (`backhaul[^|]*) \|[^|]*\| ([^|]*) \|$", PAGE.read_text(), re.MULTILINE))
    named = {
        name: set(re.findall(r"`(\w+)`", imports)) for names, imports in rows.items() for name in names.split(", ")
    }
    assert {name.strip("`") for name in named} == set(PACKAGES)
    for package, allowed in MAY_IMPORT.items():
        assert named[f"`{package}`"] == {name.split(".")[0] for name in allowed}, package
    assert {name.strip("`") for name in named if not named[name]} == {"backhaul_protocol", *TOOLS}


def test_every_path_on_the_page_is_there():
    for name in re.findall(r"`([\w/]+\.py)`", PAGE.read_text()):
        root = PAGE.parents[1]
        assert any((base / name).exists() for base in (ROUTER, root, root / "tools")), name
