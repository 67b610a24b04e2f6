"""Configuration of Sphinx."""

import importlib.util

from mpistrat.version import __version__

project = "mpistrat"
author = "The mpistrat developers"
copyright = author
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
myst_enable_extensions = ["colon_fence", "deflist"]
copybutton_exclude = ".linenos, .gp, .go"
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"mpistrat {release}"

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say it
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
# The pages need no PyTorch.
autodoc_mock_imports = [] if importlib.util.find_spec("torch") else ["torch"]
default_role = "code"
