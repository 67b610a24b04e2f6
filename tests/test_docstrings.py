"""Every public function says whether all ranks must call it."""

import enum
import inspect
import re

import mpistrat as ms

# Their members communicate nothing by nature.
PASSIVE = (enum.Enum, BaseException)
SAID = re.compile(r"\b[Cc]ollective\b|\b[Ll]ocal\b")


def public_functions():
    modules = [ms, ms.data, ms.optimizers, ms.layers, ms.metrics, ms.gradients, ms.testing]
    for module in modules:
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
