"""Rules about the source itself. The import contracts are import-linter's (pyproject.toml)."""

import ast
import importlib
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 450

# Package folder -> folder of its tests.
PACKAGES = {
    "bench": "bench",
    "gateway": "gateway",
    "jaxengine": "jaxengine",
    "kernels_pallas": "kernels_pallas",
    "clients/headrace_client": "clients",
}

# Declarations without behaviour of their own; every other source file has its test file.
UNTESTED = {
    "gateway/app_keys.py",
    "gateway/text_codec.py",
    "jaxengine/device_interface.py",
    "kernels_pallas/kernel_names.py",
}


def source_files() -> list[str]:
    return sorted(
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    )


def test_file_of(source: str) -> str:
    package = next(name for name in PACKAGES if source.startswith(f"{name}/"))
    inner = Path(source).relative_to(package)
    return (Path("tests") / PACKAGES[package] / inner.parent / f"test_{inner.name}").as_posix()


test_file_of.__test__ = False  # type: ignore[attr-defined]  # a helper, whatever its name says


@cache
def repository_files() -> tuple[Path, ...]:
    """Files that are, or would be, committed."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return tuple(
        path for name in answer.stdout.split("\0") if name and (path := ROOT / name).is_file()
    )


def read_texts() -> list[tuple[str, str]]:
    """Name and text of every file that is text."""
    texts = []
    for path in repository_files():
        data = path.read_bytes()
        if b"\0" not in data:
            texts.append((path.relative_to(ROOT).as_posix(), data.decode("utf-8", "replace")))
    return texts


@cache
def parse(source: str) -> ast.Module:
    return ast.parse((ROOT / source).read_text(encoding="utf-8"))


def exported_names(module: ast.Module) -> list[str] | None:
    """The strings of `__all__`; None where there is none."""
    for node in module.body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["__all__"]:
            names = ast.literal_eval(node.value)
            return list(names)
    return None


def bound_names(module: ast.Module) -> set[str]:
    """Names that the top level of a module binds."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def module_name(source: str) -> str:
    return source.removeprefix("clients/").removesuffix(".py").replace("/", ".")


def test_no_source_file_is_too_long_to_read():
    lengths = {
        name: text.count("\n") for name, text in read_texts() if name.endswith((".py", ".js"))
    }
    too_long = {name: length for name, length in lengths.items() if length > MAX_LINES}
    assert too_long == {}


def test_every_source_file_has_its_test_file():
    untested = {
        source
        for source in source_files()
        if not source.endswith("__init__.py") and not (ROOT / test_file_of(source)).exists()
    }
    assert not untested - UNTESTED, "\n".join(sorted(untested - UNTESTED))
    assert not UNTESTED - untested, "these have a test file now"


def test_every_test_file_of_a_package_belongs_to_a_source_file():
    sources = [test_file_of(source).removesuffix(".py") for source in source_files()]
    # The tests of what an __init__.py exports.
    sources += [source.replace("test___init__", "test_package") for source in sources]
    strays = [
        name
        for folder in PACKAGES.values()
        for path in (ROOT / "tests" / folder).rglob("test_*.py")
        # test_websocket_frames.py is about an aspect of websocket.py
        if not any(
            (name := path.relative_to(ROOT).as_posix().removesuffix(".py")) == source
            or name.startswith(f"{source}_")
            for source in sources
        )
    ]
    assert strays == []


def test_tests_have_no_packages_that_would_shadow_the_real_ones():
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_all_names_only_what_is_there():
    for source in source_files():
        names = exported_names(parse(source)) or []
        assert set(names) <= bound_names(parse(source)) | {"__version__"}, source
        assert len(names) == len(set(names)), source


def test_what_another_module_imports_is_exported():
    exports = {
        module_name(source): names
        for source in source_files()
        if (names := exported_names(parse(source))) is not None
    }
    unexported = [
        f"{source} imports {node.module}.{alias.name}"
        for source in source_files()
        for node in ast.walk(parse(source))
        if isinstance(node, ast.ImportFrom) and node.module in exports
        for alias in node.names
        if alias.name not in exports[node.module]
    ]
    assert not unexported, "\n".join(unexported)


@pytest.mark.parametrize("package", ["headrace_client"])
def test_a_package_exports_exactly_its_public_names(package: str):
    module = importlib.import_module(package)
    modules = {name for name, value in vars(module).items() if isinstance(value, type(ast))}
    public = {name for name in vars(module) if not name.startswith("_")} - modules
    assert set(module.__all__) - {"__version__"} == public


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("headrace_client", {"jax", "flax", "numpy", "gateway", "jaxengine", "kernels_pallas"}),
        ("headrace_client.cli", {"jax", "flax", "numpy", "gateway", "jaxengine"}),
        ("jaxengine", {"jax", "flax", "aiohttp"}),
        ("gateway.cli", {"jax", "flax", "numpy", "aiohttp", "jaxengine", "headrace_client"}),
        ("gateway.app", {"jax", "flax"}),
        ("gateway.commands.doctor", {"jax", "flax", "numpy"}),
        ("bench.cli", {"jax", "flax", "numpy", "jaxengine"}),
    ],
)
def test_importing_one_thing_does_not_load_another(module: str, unwanted: set[str]):
    script = f"import sys, {module}; print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    loaded = {name.partition(".")[0] for name in answer.stdout.decode().split()}
    assert loaded & unwanted == set()


def test_packages_do_not_print():
    printing = [
        f"{source}:{node.lineno}"
        for source in source_files()
        for node in ast.walk(parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]
    assert printing == []


def test_no_file_names_a_package_registry():
    # In two parts, so that this file does not name one either.
    hosts = ["pypi" + ".org", "python" + "hosted.org", "npm" + "js.org", "npm" + "js.com"]
    naming = [name for name, text in read_texts() if any(host in text for host in hosts)]
    assert naming == []


def test_no_file_holds_a_path_of_somebodys_machine():
    machine_path = re.compile(r"(?<![\w.~:/*-])/(?:home|root|Users|work|tmp)/[\w.-]+")
    found = [
        f"{name}: {match.group()}"
        for name, text in read_texts()
        # Tests show that such paths do not leak, with made-up ones.
        if not name.startswith("tests/") and (match := machine_path.search(text))
    ]
    assert not found, "\n".join(found)
