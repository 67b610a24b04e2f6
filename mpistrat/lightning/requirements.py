"""Lightning, under either of its two package names, imported when it is first needed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

_PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
"""The packages that have the same `Trainer`, and the modules with its names."""


def load_lightning() -> Any:
    """Return the module with `Trainer` and `Callback` that the program uses. Local.

    The two packages have different classes of the same names. If the program has imported only one
    of them, it is this one.

    Raises
    ------
    ImportError
        If none of the packages is installed.
    """
    imported = [name for name in _PACKAGES.values() if sys.modules.get(name) is not None]
    installed = [name for package, name in _PACKAGES.items() if _is_installed(package)]
    for name in (*imported, *installed):
        if name == "pytorch_lightning":
            import pytorch_lightning

            return pytorch_lightning
        import lightning.pytorch

        return lightning.pytorch
    raise ImportError(
        "mpistrat.lightning needs Lightning, which is not installed: pip install lightning"
    )


def _is_installed(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    return find_spec(package) is not None


def check_version(fit_loop: Any, version: str) -> None:
    """Raise NotImplementedError for a Lightning whose loops cannot resume within an epoch."""
    if not (hasattr(fit_loop, "restarted_mid_epoch") and hasattr(fit_loop, "is_resuming")):
        raise NotImplementedError(
            f"mpistrat.lightning needs Lightning 2.6 or newer, and this is {version}: the loops of "
            "older ones do not resume within an epoch. Install a newer one: "
            'pip install "lightning>=2.6"'
        )
