"""Every public function says whether all ranks must call it."""

import enum
import inspect
import re

import mpistrat as ms

try:
    import mpistrat.torch as mst
except ImportError:
    mst = None

# Their members communicate nothing by nature.
PASSIVE = (enum.Enum, BaseException)
SAID = re.compile(r"\b[Cc]ollective\b|\b[Ll]ocal\b")


def public_functions():
    modules = [ms, ms.data, ms.optimizers, ms.layers, ms.metrics, ms.gradients, ms.testing]
    for module in [*modules, *([] if mst is None else [mst])]:
        for name in module.__all__:
            member = getattr(module, name)
            if inspect.isfunction(member):
                yield f"{module.__name__}.{name}", member
            elif inspect.isclass(member) and not issubclass(member, PASSIVE):
                yield from public_methods(f"{module.__name__}.{name}", member)


def public_methods(path, cls):
    for name, member in inspect.getmembers(cls):
        if name.startswith(("_", "test_")):
            continue
        if isinstance(member, property):
            member = member.fget
        is_method = inspect.isfunction(member) or inspect.ismethod(member)
        if is_method and member.__module__.startswith("mpistrat"):
            yield f"{path}.{name}", member


def test_each_public_function_says_collective_or_local():
    functions = dict(public_functions())
    assert {"mpistrat.MPIStrategy.run", "mpistrat.data.Dataset.batch"} <= functions.keys()
    texts = {path: inspect.getdoc(function) or "" for path, function in functions.items()}
    assert [path for path, text in texts.items() if not SAID.search(text)] == []


SECTION = r"^{}\n-+\n(.*?)(?=^\w[\w ]*\n-+\n|\Z)"


def section(text, name):
    """Return the lines of a section of a numpydoc docstring, or an empty string."""
    match = re.search(SECTION.format(name), text, re.MULTILINE | re.DOTALL)
    return match[1] if match else ""


def described(text):
    """Return the names of the parameters that a docstring describes."""
    heads = re.findall(
        r"^([*\w, ]+?)(?: :|$)", section(text, "(?:Other )?Parameters"), re.MULTILINE
    )
    return {name.strip("* ") for head in heads for name in head.split(",")}


def is_short_form(text):
    """Return whether a docstring is of a name that needs no more: it is in terms of another."""
    return re.search(r"Has no effect|Deprecated\.|to be overridden|: see `|Same as `", text)


def test_each_public_function_describes_its_parameters_and_what_it_returns():
    missing = []
    for path, function in dict(public_functions()).items():
        text = inspect.getdoc(function) or ""
        signature = inspect.signature(function)
        names = {name for name in signature.parameters if name not in ("self", "cls")}
        names = {name for name in names if not name.startswith("_")}
        lacking = sorted(names - described(text))
        is_property = isinstance(inspect.getattr_static(*owner(path)), property)
        says_nothing = signature.return_annotation in (None, "None", "NoReturn", "Self")
        if not is_property and not (says_nothing or section(text, "(?:Returns|Yields)")):
            lacking.append("Returns")
        if lacking and not is_short_form(text):
            missing.append(f"{path}: {', '.join(lacking)}")
    assert missing == []


def owner(path):
    """Return the class or module of a name, and the last part of the name."""
    found = ms
    *parts, name = path.split(".")[1:]
    for part in parts:
        found = getattr(found, part)
    return found, name
