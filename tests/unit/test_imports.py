"""The house rules: who may import whom, no circles, a light configuration, thin recipes."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The table, top to bottom: a module imports only from rows above its own, or from its own part. The parts of one row
# stand side by side and do not know each other.
ROWS = (
    {"ops"},
    {"hybrid.fields"},
    {"hybrid.algorithms"},
    {"hybrid.config", "hybrid.arguments"},
    {"hybrid.learning_config"},
    {"hybrid.deepspeed"},
    {"hybrid.layout"},
    {"hybrid.peak", "hybrid.host_memory"},
    {"hybrid.parallel"},
    {"hybrid.launch"},
    {"hybrid.monitor"},
    {"hybrid.offload"},
    {"hybrid.models"},
    {"hybrid.zero", "hybrid.inference"},  # the engine and its memory plan alone know both
    {"hybrid.memory_plan"},
    {"hybrid.engine"},
    {"hybrid.checkpoint"},
    {"hybrid.runs"},
    {"hybrid.data"},
    {"hybrid.rewards"},
    {"hybrid.learning"},
    {"hybrid.rl"},  # mixes supervised losses in
    {"recipes", "scripts"},
)
RANK = {part: number for number, row in enumerate(ROWS) for part in row}
TORCHLESS = (
    *("hybrid.fields", "hybrid.algorithms", "hybrid.config", "hybrid.arguments", "hybrid.learning_config"),
    *("hybrid.deepspeed", "hybrid.layout"),
)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def modules() -> dict[str, Path]:
    paths = [path for top in ("ops", "hybrid", "recipes", "scripts") for path in sorted((ROOT / top).rglob("*.py"))]
    return {module_name(path): path for path in paths}


def part_of(module: str) -> str:
    """The table's entry that a module belongs to."""
    top, _, rest = module.partition(".")
    return f"hybrid.{rest.partition('.')[0]}" if top == "hybrid" and rest else top


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(module: str, *, at_import: bool = False) -> set[str]:
    """Our own modules that a module imports; with ``at_import`` only those that run when it is imported."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if at_import and (
            is_type_checking(node) or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        ):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import; write the whole name"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules() else str(node.module))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(modules()[module].read_text()))
    return {name for name in found if name in modules() and name != module}


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_run_one_way_down_the_table(module: str) -> None:
    if module == "hybrid":
        pytest.skip("names what it exports, and loads none of it")
    part = part_of(module)
    assert part in RANK, f"{module} is in no row of the table"
    for imported in imports(module):
        if imported == "hybrid":
            continue
        other = part_of(imported)
        assert other == part or RANK[other] < RANK[part], f"{module} must not import {imported}"


def test_no_circles_between_files() -> None:
    graph = {module: imports(module, at_import=True) for module in modules() if module != "hybrid"}
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            for imported in graph.get(module, ()):
                # A package's __init__ gathers from its files; they import one another, not the package.
                walk(imported, (*path, module))
            done.add(module)

    for module in graph:
        walk(module, ())


def test_no_utils() -> None:
    assert not [name for name in modules() if name.rpartition(".")[2] in ("utils", "util", "helpers", "common", "misc")]


@pytest.mark.parametrize("module", TORCHLESS)
def test_configuration_imports_no_torch(module: str) -> None:
    program = f"import sys, {module}; sys.exit(bool({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_exports_exist() -> None:
    import hybrid

    assert sorted(hybrid.__all__) == sorted(hybrid._EXPORTS)
    for name in hybrid.__all__:
        assert getattr(hybrid, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hybrid.nothing


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.py")), ids=lambda path: path.name)
def test_recipes_are_thin_and_open_with_their_commands(recipe: Path) -> None:
    text = recipe.read_text()
    assert len(text.splitlines()) <= 150
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert f"python recipes/{recipe.name}" in docstring
    assert "torchrun" in docstring
    assert "def main(argv" in text
