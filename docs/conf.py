"""Configuration of Sphinx."""

import ast
import enum
import importlib.util
import inspect
import os
import re
import zlib
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.errors import PycodeError
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

import mpistrat as ms
import mpistrat.keras
from mpistrat.version import __version__

HERE = Path(__file__).parent
MODULES = {"mpistrat": ms, "mpistrat.optimizers.schedules": ms.optimizers.schedules}
for name in ("data", "errors", "gradients", "layers", "metrics", "optimizers", "testing"):
    MODULES[f"mpistrat.{name}"] = getattr(ms, name)
PUBLIC = {name for module in MODULES.values() for name in module.__all__}
CLASSES = {
    f"{path}.{name}": getattr(module, name)
    for path, module in MODULES.items()
    for name in module.__all__
    if inspect.isclass(getattr(module, name))
}
HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_LIGHTNING, HAS_TRANSFORMERS = (
    HAS_TORCH and importlib.util.find_spec(name) is not None
    for name in ("lightning", "transformers")
)
HAS_KERAS = HAS_TORCH and importlib.util.find_spec("keras") is not None
os.environ["KERAS_BACKEND"] = "torch"
if not HAS_KERAS:  # its names are imported with a stand-in for it
    mpistrat.keras._load_keras = lambda: None

project = "mpistrat"
author = "The mpistrat developers"
copyright = author
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "_inventories"]
templates_path = ["_templates"]
default_role = "py:obj"  # a name in a docstring is a link where it has an entry

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

# Reference. A page for each class; functions are together on one page for each topic.

autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_type_aliases = {
    "npt.ArrayLike": "numpy.typing.ArrayLike",
    "npt.DTypeLike": "numpy.typing.DTypeLike",
}
autodoc_mock_imports = [
    *([] if HAS_TORCH else ["torch"]),
    *([] if HAS_KERAS else ["keras"]),
    *([] if HAS_LIGHTNING else ["lightning"]),
    *([] if HAS_TRANSFORMERS else ["transformers"]),
]
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 88
python_display_short_literal_types = True
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_preprocess_types = True
napoleon_type_aliases = {
    "array": "`array`",
    "arrays": "`arrays`",
    "callable": "callable",
    "generator": ":class:`generator <numpy.random.Generator>`",
    "iterable": ":class:`iterable <collections.abc.Iterable>`",
    "mapping": ":class:`mapping <collections.abc.Mapping>`",
    "path": ":class:`path <os.PathLike>`",
    "sequence": ":class:`sequence <collections.abc.Sequence>`",
    "timedelta": ":class:`datetime.timedelta`",
}

# Names of other packages. The addresses of those that docstrings use are in docs/_inventories, so
# that a build without a network has the same links as one with it.

PACKAGES = {
    "h5py": "https://docs.h5py.org/en/stable/",
    "mpi4py": "https://mpi4py.readthedocs.io/en/stable/",
    "numpy": "https://numpy.org/doc/stable/",
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
}


def inventory(name):
    """Return the path of a Sphinx inventory made from the text file of one package."""
    lines = (HERE / "_inventories" / f"{name}.txt").read_text().splitlines()
    entries = (line.split() for line in lines if not line.startswith("#"))
    body = "".join(f"{obj} {role} 1 {address} -\n" for obj, role, address in entries)
    head = "The remainder of this file is compressed using zlib."
    path = HERE / "_build" / "inventories" / f"{name}.inv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        f"# Sphinx inventory version 2\n# Project: {name}\n# Version: stable\n# {head}\n".encode()
        + zlib.compress(body.encode())
    )
    return str(path)


# With MPISTRAT_DOCS_ONLINE=1 the packages' own inventories come first.
ONLINE = (None,) if os.environ.get("MPISTRAT_DOCS_ONLINE") == "1" else ()
intersphinx_mapping = {
    name: (address, (*ONLINE, inventory(name))) for name, address in PACKAGES.items()
}

# Theme. The colours are those of the pictures.

html_theme = "furo"
html_title = "mpistrat " + ".".join(__version__.split(".")[:3])
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0f4c92",
        "color-brand-content": "#0f4c92",
        "color-brand-visited": "#6b3f63",
        "color-api-name": "#c2330c",
        "color-api-pre-name": "#59636e",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7fb0ee",
        "color-brand-content": "#7fb0ee",
        "color-brand-visited": "#f0a4e4",
        "color-api-name": "#ff9a6b",
        "color-api-pre-name": "#a1abb6",
    },
    "source_repository": "https://github.com/mpistrat/mpistrat/",
    "source_branch": "main",
    "source_directory": "docs/",
    "top_of_page_buttons": ["edit"],
    "footer_icons": [
        {
            "name": "GitHub",
            "url": "https://github.com/mpistrat/mpistrat",
            "html": "GitHub",
            "class": "",
        }
    ],
}


def drop_overloads(name):
    """Have autodoc show the signature of the implementation alone."""
    try:
        analyzer = ModuleAnalyzer.for_module(name)
        analyzer.analyze()
    except PycodeError:
        return
    analyzer.overloads.clear()


GIVEN = ("Dataset", "DistributedDataset", "Injection", "MultiStepContext")
GIVEN += ("Strategy", "StrategyExtended")
"""Classes whose objects come from functions: their constructors are left out."""


def types_once(app, what, name, obj, options, signature, returns):
    """Leave types out of a signature whose docstring has them in its sections."""
    drop_overloads(getattr(obj, "__module__", None) or "")
    if what not in ("class", "exception", "function", "method") or not signature:
        return None
    if what == "class" and (obj.__name__ in GIVEN or issubclass(obj, enum.Enum)):
        return "", ""
    text = obj.__doc__ or ""
    if re.search(r"^\s*Parameters\n\s*-{3}", text, re.MULTILINE):
        try:
            tree = ast.parse(f"def f{signature}: ...").body[0].args
        except SyntaxError:  # a default value without a literal
            return None
        for each in ast.walk(tree):
            if isinstance(each, ast.arg):
                each.annotation = None
        signature = f"({ast.unparse(tree)})"
    if re.search(r"^\s*(Returns|Yields)\n\s*-{3}", text, re.MULTILINE) or what == "class":
        returns = ""
    return signature, returns or ""


def is_known(base):
    """Return whether a reader can look up a base class."""
    module = getattr(base, "__module__", "")
    return not module.startswith("mpistrat.") or base.__name__ in PUBLIC


# Members of a base that has no page stand with those of the class.
autosummary_context = {
    "bases_with_members_elsewhere": "object, Enum, BaseException, tuple, TestCase, "
    "LearningRateSchedule, Metric, Optimizer, Strategy, DistributedValues, InputContext, "
    "Callback, PyDataset",  # of Keras
    "classes_with_known_bases": [
        path for path, cls in CLASSES.items() if set(filter(is_known, cls.__bases__)) - {object}
    ],
    # Their methods have a page each.
    "large_classes": [
        "mpistrat.data.Dataset",
        "mpistrat.ReplicaContext",
        "mpistrat.ShardedVariable",
        "mpistrat.Strategy",
        "mpistrat.StrategyExtended",
        "mpistrat.Variable",
    ],
    "enumerations": [path for path, cls in CLASSES.items() if issubclass(cls, enum.Enum)],
}


def public_bases(app, name, obj, options, bases):
    """Leave out bases that have no page."""
    bases[:] = filter(is_known, bases)


def before_napoleon(app, what, name, obj, options, lines):
    """Keep from napoleon what it misreads."""
    if what in ("attribute", "data", "property") and lines:
        lines.insert(0, "\\ ")  # or else the text before a colon is taken for the type
    for index, line in enumerate(lines):
        if re.fullmatch(r"[A-Z]\w+(, [A-Z]\w+)+", line):  # or else only the first exception shows
            lines[index] = line.replace(", ", "_OR_")


def after_napoleon(app, what, name, obj, options, lines):
    """Separate the exceptions again."""
    for index, line in enumerate(lines):
        if line.startswith(":raises "):
            lines[index] = line.replace("_OR_", " or ")


def short_name(app, env, node, contnode):
    """Resolve `CollectiveError` in a module whose namespace has no such name."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target:
        return None
    domain = env.domains["py"]
    found = [f"{module}.{target}" for module in MODULES if f"{module}.{target}" in domain.objects]
    if len(found) != 1:
        return None
    page, anchor = domain.objects[found[0]][:2]
    return make_refnode(app.builder, node["refdoc"], page, anchor, contnode, found[0])


def ways_back(app, page, template, context, doctree):
    """Mend links from a source page to entries under another module than that of the first."""
    if not page.startswith("_modules/mpistrat/"):
        return
    objects = app.env.domains["py"].objects

    def right(match):
        name = match[1]
        found = {f"{module}.{name.rpartition('.')[2]}" for module in MODULES} & objects.keys()
        return match[0] if name in objects or len(found) != 1 else f'#{found.pop()}"'

    context["body"] = re.sub(r'#(mpistrat\.[\w.]+)"', right, context["body"])


class Picture(SphinxDirective):
    """A picture of `docs/images` in both themes: ``{picture} images/name``.

    Phones show ``images/name-narrow`` instead, if there is one.
    """

    required_arguments = 1
    option_spec: ClassVar = {"alt": directives.unchanged_required}

    def run(self):
        """Return a box with the image for light pages and the one for dark pages."""
        name = self.arguments[0]
        folder = Path(self.env.doc2path(self.env.docname)).parent
        if not (folder / f"{name}-narrow-light.svg").exists():
            return [self.box(name, ["wide-picture"])]
        return [self.box(name, ["no-phone"]), self.box(f"{name}-narrow", ["phone"])]

    def box(self, name, classes):
        """Return both images of one version."""
        box = nodes.container(classes=classes)
        box += [
            nodes.image(
                uri=f"{name}-{theme}.svg", alt=self.options["alt"], classes=[f"only-{theme}"]
            )
            for theme in ("light", "dark")
        ]
        return box


def setup(app):
    """Register the directive, and what changes signatures."""
    app.add_directive("picture", Picture)
    app.connect("autodoc-process-signature", types_once)
    app.connect("autodoc-process-bases", public_bases)
    app.connect("autodoc-process-docstring", before_napoleon, priority=400)
    app.connect("autodoc-process-docstring", after_napoleon, priority=600)
    app.connect("missing-reference", short_name)
    app.connect("html-page-context", ways_back)
