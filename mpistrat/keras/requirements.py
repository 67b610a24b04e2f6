"""What this package needs of Keras: the PyTorch backend, and a version that distributes over it."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from typing import Any

from mpistrat.errors import LaunchError
from mpistrat.settings import environment

_NEWEST_TOO_OLD = "3.15"
_OLDEST = (3, 16)


def load_keras() -> Any:
    """Return the package `keras`, imported with the PyTorch backend. Local.

    Raises
    ------
    LaunchError
        If Keras has a different backend, or would get one.
    NotImplementedError
        If Keras is older than 3.16.
    ImportError
        If Keras is not installed.
    """
    check_backend()
    try:
        keras = importlib.import_module("keras")
    except ModuleNotFoundError as error:
        if error.name != "keras":
            raise
        raise ImportError(
            "mpistrat.keras needs Keras 3.16 or newer, which is not installed: "
            "pip install --pre keras-nightly"
        ) from None
    check_version(keras.__version__)
    return keras


def check_backend() -> None:
    """Raise LaunchError if Keras has a backend other than PyTorch, or would get one."""
    backend = backend_of_keras()
    if backend != "torch":
        raise LaunchError(
            f"The backend of Keras is {backend!r}, but mpistrat needs 'torch'. Set the "
            "environment variable KERAS_BACKEND=torch before the program imports Keras, for "
            'example by os.environ["KERAS_BACKEND"] = "torch" in its first lines.'
        )


def check_version(version: str) -> None:
    """Raise NotImplementedError for a version of Keras that cannot distribute over PyTorch."""
    numbers = tuple(int(each) for each in re.findall(r"\d+", version)[:2])
    if numbers < _OLDEST:
        raise NotImplementedError(
            f"mpistrat.keras needs Keras 3.16 or newer, and this is {version}: Keras distributes "
            f"over PyTorch only since then. As long as {_NEWEST_TOO_OLD} is the newest release, "
            "install a nightly build: pip install --pre keras-nightly"
        )


def backend_of_keras() -> str:
    """Return the backend of Keras, or the one that it would get if it were imported now. Local."""
    keras = sys.modules.get("keras")
    config = getattr(keras, "config", None)
    if config is not None:
        return str(config.backend())
    variables = environment()
    return variables.get("KERAS_BACKEND") or _configured_backend() or "tensorflow"


def _configured_backend() -> str:
    """Return the backend that the user's file of settings for Keras names, empty without one."""
    folder = environment().get("KERAS_HOME") or os.path.expanduser("~/.keras")
    try:
        with open(os.path.join(folder, "keras.json"), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):  # Keras too works without the file
        return ""
    return str(found.get("backend", "")) if isinstance(found, dict) else ""
