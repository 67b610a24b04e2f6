"""The architecture, read from the imports: layers, circles, and adapters to outside worlds.

The layers stand in one place, the table of docs/architecture.md.
"""

import ast
import functools

import pytest

from tools import house

PACKAGE = house.PACKAGE
LAYERS = house.layers()

# Each outside world has one adapter: packages that are imported, and names that are used.
PACKAGES = {
    "cupy": {"cuda_api.py"},
    "h5py": {"hdf5.py"},
    "ml_dtypes": {"comm/wire.py"},
    "optree": {"nests.py"},
    "torch": {"pytorch.py", "torch/", "keras/"},
    "keras": {"keras/"},
    "lightning": {"lightning/"},
    "pytorch_lightning": {"lightning/"},
    "transformers": {"transformers/"},
    "xxhash": {"system/xxh3.py"},
}
NAMES = {
    "os.environ": {"settings.py"},
    "os.getenv": set(),
    "MPI.COMM_WORLD": {"mpi/world.py"},
    "MPI.Get_library_version": {"mpi/world.py"},
}

ENTRY_POINTS = house.ROOT / "mpistrat_torch_autoload.py"
"""What PyTorch imports."""

MODULES = house.modules()


@functools.cache
def import_graph():
    return house.import_graph(MODULES)


def top_level(name):
    """Return a module's row in the table: its folder, or its own name."""
    return name.split(".")[1] if "." in name else "__init__"


@functools.cache
def nodes_of(path):
    """Return every node of the syntax tree of a file."""
    return tuple(ast.walk(house.syntax_tree(path)))


def test_the_table_has_every_module_once():
    modules = [each for layer in LAYERS for each in layer]
    assert sorted(modules) == sorted({top_level(name) for name in MODULES})


def test_imports_point_downward():
    level = {each: number for number, layer in enumerate(LAYERS) for each in layer}
    upward = [
        f"{name}:{line} imports {target}"
        for name, path in MODULES.items()
        for target, line in house.imports_of(path, MODULES)
        if (own := top_level(name)) != (other := top_level(target)) and level[other] >= level[own]
    ]
    assert not upward, "\n".join(upward)


def test_a_layer_rests_on_the_one_below():
    """A module stands as low as what it imports lets it."""
    level = {each: number for number, layer in enumerate(LAYERS) for each in layer}
    for name, targets in house.folder_graph(import_graph()).items():
        below = [level[top_level(target)] for target in targets]
        assert level[top_level(name)] == 1 + max(below, default=-1), name


def exported_names(name):
    """Return what a module offers: its `__all__`, or what it defines without an underscore."""
    found = set()
    for node in house.syntax_tree(MODULES[name]).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (each for target in targets for each in ast.walk(target))
            found |= {each.id for each in names if isinstance(each, ast.Name)}
    return {each for each in found if not each.startswith("_")}


def names_used_by(path):
    """Return (module, name) for each name that a file takes from a module of the package."""
    found, modules = set(), {}
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                deeper = f"{node.module}.{alias.name}"
                if deeper in MODULES:
                    modules[alias.asname or alias.name] = deeper
                else:
                    found.add((node.module, alias.name))
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module is not None and f"{module}.{node.attr}" not in MODULES:
                found.add((module, node.attr))
    return found


def public_modules():
    """Return the modules whose `__all__` is a part of the public interface."""
    inner = {f"{PACKAGE.name}.{name}" for name in exported_names(PACKAGE.name)} & MODULES.keys()
    deeper = {f"{name}.{each}" for name in inner for each in exported_names(name)}
    frameworks = ("torch", "keras", "lightning", "transformers")
    outer = {PACKAGE.name, *(f"{PACKAGE.name}.{each}" for each in frameworks)}
    return outer | inner | (deeper & MODULES.keys())


@functools.cache
def used_names():
    """Return (module, name) for each name that another module takes, or that is public."""
    taken = {
        (module, name)
        for importer, path in MODULES.items()
        for module, name in names_used_by(path)
        if module != importer
    }
    public = {(module, name) for module in public_modules() for name in exported_names(module)}
    outside = [*house.ROOT.glob("benchmarks/*.py"), *house.ROOT.glob("tools/**/*.py"), ENTRY_POINTS]
    return taken.union(public, *map(names_used_by, outside))


def test_every_name_has_a_use():
    # Pytest finds hooks and fixtures, and Python the start of the watch.
    for_others = (f"{PACKAGE.name}.testing.", f"{PACKAGE.name}.watch.startup.")
    unused = [
        f"{module}.{name}"
        for module, path in MODULES.items()
        for name in exported_names(module) - {name for of, name in used_names() if of == module}
        if not module.startswith(for_others) and not is_used_within(path, name)
    ]
    assert unused == []


def is_used_within(path, name):
    """Return whether a file uses a name that it defines, maybe in an annotation or a program."""
    return any(
        (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load))
        or (isinstance(node, ast.Constant) and name in str(node.value).split())
        or (isinstance(node, ast.ClassDef) and node.name == name and node.keywords)  # its base's
        for node in nodes_of(path)
    )


def test_names_that_are_used_elsewhere_have_no_underscore():
    hidden = [
        f"{module}.{name}"
        for module, name in sorted(used_names())
        if module not in public_modules()  # where users may not import it
        and name.startswith("_")
        and not name.startswith("__")  # such as a module's own __file__
    ]
    assert hidden == []


def test_only_what_users_import_has_a_list_of_names():
    listed = {
        module
        for module, path in MODULES.items()
        if any(isinstance(node, ast.Name) and node.id == "__all__" for node in nodes_of(path))
    }
    folders = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    assert listed <= public_modules() | folders


def test_there_is_no_circle_among_files():
    assert house.circles(import_graph()) == []


def test_there_is_no_circle_among_folders():
    assert house.circles(house.folder_graph(import_graph())) == []


def test_a_circle_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": set()}
    assert house.circles(graph) == [["a", "b", "c"]]


def test_imports_for_types_and_in_functions_count(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "if TYPE_CHECKING:\n    from mpistrat.values import PerReplica\n"
        "def work():\n    import mpistrat.nests\n    from mpistrat import hdf5\n"
    )
    found = [target for target, _ in house.imports_of(path, MODULES)]
    assert sorted(found) == ["mpistrat.hdf5", "mpistrat.nests", "mpistrat.values"]


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
        for path in MODULES.values()
        if any(test(node) for node in nodes_of(path))
    }


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_one_module_imports_each_outside_package(package):
    found = files_where(lambda node: imports_package(node, package))
    folders = {f"{each.partition('/')[0]}/" if "/" in each else each for each in found}
    allowed = PACKAGES[package]
    assert {each for each in found | folders if each in allowed} == allowed
    assert all(each in allowed or f"{each.partition('/')[0]}/" in allowed for each in found)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_one_module_uses_each_outside_name(name):
    found = files_where(lambda node: isinstance(node, ast.Attribute) and ast.unparse(node) == name)
    assert found == NAMES[name]


def test_objects_between_ranks_alone_are_pickled():
    def imports_pickle(node):
        return isinstance(node, ast.Import | ast.ImportFrom) and "pickle" in {
            getattr(node, "module", None),
            *(alias.name for alias in node.names),
        }

    assert files_where(imports_pickle) == {"collectives/objects.py"}
