"""What holds for the source tree as a whole: which package may import which, and what importing Backhaul costs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from backhaul_cli.main import BENCH, COMMANDS, parser

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = {init.parent.name: init.parent for init in ROOT.glob("*/backhaul*/__init__.py")}

MAY_IMPORT = {
    "backhaul_protocol": set(),
    "backhaul_router": {"backhaul_protocol"},
    "backhaul": {"backhaul_router"},
    "backhaul_langchain": {"backhaul", "backhaul_router"},
    "backhaul_connector": {"backhaul_protocol"},
    "backhaul_loopback": {
        "backhaul_protocol",
        *(f"backhaul_connector.{pure}" for pure in ("claims", "handles", "lease_channel", "lease_table", "locators")),
    },
}
"""Imports run one way: integrations, sdk, router, protocol. A loopback engine shares the pure parts of the connector."""

TOOLS = ("backhaul_bench", "backhaul_cli", "backhaul_demo")
"""Commands that start whole clusters stand above the packages: they import from all, and no package imports them."""

ROOMS = ("wire", "identity", "ledger", "fleet", "turn", "engines", "drive", "serve")
"""The router's sub-packages, from the lowest: each imports itself, those before it, and the modules at the root."""

ENGINE_SIDE = {"gguf", "nixl", "tokenizers", "torch", "transformers", "vllm"}
"""Installed where engines run: importing Backhaul must work without them."""


@dataclass(frozen=True)
class Import:
    importer: str
    imported: str
    at_import_time: bool

    def __str__(self) -> str:
        return f"{self.importer} imports {self.imported}"


def imports_of(path: Path, package: Path, *, of_types: bool = False) -> Iterator[Import]:
    """With `of_types` those that only the type checker sees as well."""
    module = ".".join(path.relative_to(package.parent).with_suffix("").parts)
    module = module.removesuffix(".__init__")
    parent = module.split(".")[: None if path.stem == "__init__" else -1]

    def visit(node: ast.AST, at_import_time: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, at_import_time)
        elif isinstance(node, ast.ImportFrom):
            base = (
                [*parent[: len(parent) + 1 - node.level], *filter(None, [node.module])] if node.level else [node.module]
            )
            for alias in node.names:
                yield Import(module, ".".join([*base, alias.name]), at_import_time)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING") and not of_types:
            return
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, at_import_time and not inside)

    yield from visit(ast.parse(path.read_text(), path), True)


IMPORTS = [
    found for package in PACKAGES.values() for path in package.rglob("*.py") for found in imports_of(path, package)
]
ALL_IMPORTS = [
    found
    for package in PACKAGES.values()
    for path in package.rglob("*.py")
    for found in imports_of(path, package, of_types=True)
]


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_the_imports_are_found():
    assert Import("backhaul_router.report", "msgspec", True) in IMPORTS
    assert Import("backhaul_router.config", "backhaul_router.errors.ConfigError", True) in IMPORTS


def is_tool(module: str) -> bool:
    return any(within(module, tool) for tool in TOOLS)


@pytest.mark.parametrize("package", [package for package in PACKAGES if not is_tool(package)])
def test_packages_import_each_other_one_way(package):
    others = {name for name in PACKAGES if name != package}
    wrong = [
        str(found)
        for found in IMPORTS
        if within(found.importer, package)
        and any(within(found.imported, other) for other in others)
        and not any(within(found.imported, allowed) for allowed in MAY_IMPORT[package])
    ]
    assert wrong == []


def test_no_package_imports_the_tools_above_it():
    assert [str(found) for found in IMPORTS if is_tool(found.imported) and not is_tool(found.importer)] == []


FACE = {f"backhaul_router.{name}" for name in ("asgi", "engine_client", "metrics", "router", "tenants", "tracing")}
"""What documentation names for import. They stand above the rooms and hold nothing of their own; no other module imports them."""


def room_of(module: str) -> str | None:
    """The router's room that a name is in; `""` for its root, `None` for what is none of the router's."""
    if not within(module, "backhaul_router"):
        return None
    return next((room for room in ROOMS if within(module, f"backhaul_router.{room}")), "")


def test_every_folder_of_the_router_is_a_room_with_a_place_in_the_order():
    assert {path.parent.name for path in PACKAGES["backhaul_router"].glob("*/__init__.py")} == set(ROOMS)


def test_the_rooms_of_the_router_import_lower_ones_only():
    rank = {room: number for number, room in enumerate(("", *ROOMS))}
    wrong = [
        str(found)
        for found in ALL_IMPORTS
        if found.importer not in FACE
        and (importer := room_of(found.importer)) is not None
        and (imported := room_of(found.imported)) is not None
        and rank[imported] > rank[importer]
    ]
    assert wrong == []


def circles(imports: Iterable[Import]) -> list[list[str]]:
    """Groups of modules that import each other, by Tarjan's algorithm."""
    modules = {found.importer for found in imports}
    edges: dict[str, set[str]] = {module: set() for module in modules}
    for found in imports:
        target = found.imported if found.imported in modules else found.imported.rpartition(".")[0]
        if target in modules and target != found.importer:
            edges[found.importer].add(target)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    out = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in edges[module]:
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            start = stack.index(module)
            if len(stack) - start > 1:
                out.append(sorted(stack[start:]))
            del stack[start:]

    for module in sorted(modules):
        if module not in index:
            visit(module)
    return out


def test_circles_are_found():
    a_b_a = [Import("a", "b.x", True), Import("b", "c", False), Import("c", "a", True), Import("d", "a", True)]
    assert circles(a_b_a) == [["a", "b", "c"]]


def test_no_module_imports_itself_by_way_of_others_not_even_for_types_or_inside_a_function():
    assert circles(ALL_IMPORTS) == []


def test_the_public_face_of_the_router_only_hands_on_what_rooms_hold():
    assert [str(found) for found in ALL_IMPORTS if any(within(found.imported, module) for module in FACE)] == []
    for module in FACE:
        tree = ast.parse((PACKAGES["backhaul_router"].parent / (module.replace(".", "/") + ".py")).read_text())
        assert all(isinstance(node, ast.Expr | ast.ImportFrom | ast.Assign) for node in tree.body), module


_MODULES_IN_VLLM = ("connector", "scheduler_side", "cache_groups", "worker_side", "stats")
IN_VLLM = {f"backhaul_connector.{module}" for module in _MODULES_IN_VLLM}
"""What vLLM itself imports, since it is made of vLLM's classes."""


def test_only_the_connector_imports_what_is_installed_beside_engines_and_not_before_it_is_needed():
    wrong = [
        str(found)
        for found in IMPORTS
        if found.imported.split(".")[0] in ENGINE_SIDE
        and found.importer not in IN_VLLM
        and (found.at_import_time or not within(found.importer, "backhaul_connector"))
    ]
    assert wrong == []


def test_what_vllm_imports_is_imported_by_nothing_else():
    wrong = [
        str(found)
        for found in IMPORTS
        if found.importer not in IN_VLLM and any(within(found.imported, module) for module in IN_VLLM)
    ]
    assert wrong == []


def test_importing_the_sdk_loads_no_engine_no_framework_and_no_second_http_library():
    program = """
import sys, openai
before = set(sys.modules)
import backhaul, backhaul_router.drive.router
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(ran.stdout.split())
    assert "backhaul_router" in loaded
    extras = {"aiohttp", "httpx", "langchain_core", "matplotlib", "redis", "rich", "uvicorn"}
    assert loaded & {*ENGINE_SIDE, *extras, "backhaul_connector"} == set()


def test_the_base_dependencies_are_what_the_packages_of_an_agent_import():
    base = {re.split(r"[\[>=<]", name)[0] for name in PYPROJECT["project"]["dependencies"]}
    agents = ("backhaul", "backhaul_router", "backhaul_connector")
    used = {
        found.imported.split(".")[0]
        for package in agents
        for path in PACKAGES[package].rglob("*.py")
        for found in imports_of(path, PACKAGES[package], of_types=True)
    }
    assert base <= used


@pytest.mark.parametrize(
    ("missing", "words"), [("rich", ["demo"]), ("aiohttp", ["demo"]), ("matplotlib", ["bench", "ttft"])]
)
def test_a_command_says_which_extra_it_needs(missing, words):
    program = (
        f"import sys; sys.modules[{missing!r}] = None; from backhaul_cli.main import main; sys.exit(main({words}))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    told = f"backhaul {words[0]}: this needs {missing}: pip install 'backhaul[{words[0]}]'\n"
    assert (ran.returncode, ran.stderr) == (2, told)


def test_a_command_is_imported_when_it_is_named():
    program = "import sys; from backhaul_cli.main import parser; parser([]); print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert not {"openai", "aiohttp", "rich", "backhaul_router", "backhaul_connector"} & set(ran.stdout.split())


@pytest.mark.parametrize("words", [*([name] for name in COMMANDS), *(["bench", name] for name in BENCH)], ids=" ".join)
def test_every_command_has_options_with_help(words, capsys):
    with pytest.raises(SystemExit) as end:
        parser(words).parse_args([*words, "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "--connector" in shown or "--json" in shown or "--config" in shown


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_is_typed_checked_and_distributed(package):
    assert (PACKAGES[package] / "py.typed").exists()
    assert package in PYPROJECT["tool"]["mypy"]["packages"]
    wheel = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert str(PACKAGES[package].relative_to(ROOT)) in wheel["packages"]
    assert PACKAGES[package].parent.name in wheel["dev-mode-dirs"]


def test_skips_fail_a_run_that_forbids_them(tmp_path):
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "test_it.py").write_text("import pytest\n\ndef test_it():\n    pytest.skip('no such thing here')\n")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        env={**os.environ, "BACKHAUL_NO_SKIPS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED
    assert "no such thing here: with BACKHAUL_NO_SKIPS=1, a skip is a failure" in ran.stdout


def test_a_long_module_says_at_its_top_why_it_is_not_two():
    silent = [
        path.name
        for package in PACKAGES.values()
        for path in package.rglob("*.py")
        if len(path.read_text().splitlines()) > 455
        and "Longer than most modules" not in (ast.get_docstring(ast.parse(path.read_text())) or "")
    ]
    assert silent == []


def test_no_class_has_more_public_methods_than_a_reader_can_hold():
    wrong = []
    for package in PACKAGES.values():
        for path in package.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    methods = {f.name for f in node.body if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)}
                    if len([name for name in methods if not name.startswith("_")]) > 25:
                        wrong.append(f"{path.name}: {node.name}")
    assert wrong == []
