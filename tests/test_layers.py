"""The architecture, read from the imports."""

import ast
import functools
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "mpistrat"

# Lowest first. A module imports from lower layers, and from its own folder.
LAYERS = [
    {
        *("compiled", "cores", "deprecation", "errors", "files", "native", "options"),
        *("processes", "settings", "sharding", "spelling", "version"),
    },
    {"arrays", "hdf5", "launcher", "launching", "nests", "pending", "tensors"},
    {"arguments", "comm", "spans", "tracking", "values", "world"},
    {"cuda_awareness", "epochs"},
    {"prepared"},
    {"collectives", "faults", "timeline"},
    {"axis_reductions", "context", "reductions"},
    {"data", "pullbacks", "variables"},
    {"differentiable"},
    {"replica"},
    {"strategies"},
    {"checkpoint", "gradients", "layers", "metrics", "optimizers"},
    {"bench", "doctor"},
    {"cli", "testing"},
    {"__init__"},
    {"__main__"},
]

# Each outside world has one door: packages that are imported, and names that are used.
PACKAGES = {
    "cupy": {"arrays.py"},
    "h5py": {"hdf5.py"},
    "ml_dtypes": {"comm/dtypes.py"},
    "optree": {"nests.py"},
    "torch": {"tensors.py"},
}
NAMES = {
    "os.environ": {"settings.py"},
    "os.getenv": set(),
    "MPI.COMM_WORLD": {"world.py"},
    "MPI.Get_library_version": {"world.py"},
}

FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_name(path): path for path in FILES}


def layer_of(module):
    unit = module.split(".")[0]
    for level, units in enumerate(LAYERS):
        if unit in units:
            return level
    raise AssertionError(f"{module} is in no layer: add {unit} to the table")


@functools.cache
def nodes_of(path):
    """Return every node of the syntax tree of a file."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def imports(path):
    """Yield (module of this package, line) for each import, those for types too."""
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mpistrat"):
            base = node.module.removeprefix("mpistrat").lstrip(".")
            for alias in node.names:
                deeper = f"{base}.{alias.name}".lstrip(".")
                yield (deeper if deeper in MODULES else base or "__init__"), node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("mpistrat."):
                    yield alias.name.removeprefix("mpistrat."), node.lineno


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_downward(name):
    for target, line in imports(MODULES[name]):
        if target.split(".")[0] == name.split(".")[0]:
            continue
        assert layer_of(target) < layer_of(name), f"{name}:{line} imports {target} from above"


def test_there_is_no_cycle():
    graph = {
        name: {target for target, _ in imports(path)} for name, path in MODULES.items()
    }
    # A package's __init__ collects its modules; they may not import it back.
    done, active = set(), []

    def visit(name):
        if name in active:
            raise AssertionError(
                "import cycle: " + " -> ".join([*active[active.index(name) :], name])
            )
        if name in done:
            return
        active.append(name)
        for target in graph[name] - {name}:
            visit(target)
        done.add(active.pop())

    for name in graph:
        visit(name)


def imports_package(node, package):
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] == package for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.level == 0 and (node.module or "").split(".")[0] == package
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        return package in ast.unparse(node.args[0])
    return False


def files_where(test):
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in FILES
        if any(test(node) for node in nodes_of(path))
    }


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_one_module_imports_each_outside_package(package):
    assert files_where(lambda node: imports_package(node, package)) == PACKAGES[package]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_one_module_uses_each_outside_name(name):
    found = files_where(lambda node: isinstance(node, ast.Attribute) and ast.unparse(node) == name)
    assert found == NAMES[name]


def test_nothing_is_pickled():
    for path in FILES:
        for node in nodes_of(path):
            names = [
                alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)
            ]
            assert "pickle" not in names, path
