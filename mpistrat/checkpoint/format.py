"""Format of checkpoint files: versions, names, attributes and digests.

A file holds one HDF5 dataset per variable under ``/variables``, the page digests of large variables
under ``/digests``, and one JSON string per object with other state under ``/state``. With
``num_replicas=`` the components of SyncOnRead variables are under ``/replicas``. Errors and
commands name the paths without these groups.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from dataclasses import asdict, dataclass
from datetime import datetime, timezone

import numpy as np

from mpistrat.checkpoint.digests import digest_of_text, is_digest
from mpistrat.options import VariableAggregation, VariableSynchronization
from mpistrat.version import CHECKPOINT_FORMAT_VERSION, __version__

FORMAT = "mpistrat-checkpoint"
FORMAT_VERSION = CHECKPOINT_FORMAT_VERSION
VARIABLES = "variables"
STATE = "state"
DIGESTS = "digests"
REPLICAS = "replicas"
"""Group of the components of SyncOnRead variables with ``num_replicas=``, one row per replica."""
DEEPEST = 100
"""Most levels of groups. HDF5 itself uses the stack for each level, and can overflow it."""


BITS_OF_FLOATS = {"bfloat16": np.dtype(np.uint16)} | dict.fromkeys(
    ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    np.dtype(np.uint8),
)
"""Dtypes of tensors that HDF5 does not have, and the integer dtypes that store their bits."""


@dataclass(frozen=True)
class Header:
    """The attributes of the root group."""

    step: int = -1
    """The training step, -1 if it is unknown."""
    num_replicas: int = 1
    """Number of replicas that the program had when it saved."""
    mpi_library: str = "none"
    """Name and version of the MPI library, ``"none"`` without MPI."""
    created: str = ""
    """When the file was written: ISO 8601, UTC."""
    mpistrat_version: str = __version__
    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    arithmetic: str = ""
    """Fingerprint of the arithmetic that determines the bits, of a job with ``num_replicas=``."""

    def attributes(self) -> dict[str, str | int]:
        """Return the attributes that a file has."""
        return {name: each for name, each in asdict(self).items() if name != "arithmetic" or each}

    @staticmethod
    def timestamp(created_s: float | None = None) -> str:
        """Return a time in seconds since 1970 (default: now) in the format of `created`."""
        created_s = time.time() if created_s is None else created_s
        return datetime.fromtimestamp(created_s, timezone.utc).isoformat()

    def digest(self) -> str:
        """Return the attribute ``digest``, taken over the others as JSON with sorted keys."""
        return digest_of_text(json.dumps(self.attributes(), sort_keys=True).encode())

    @property
    def created_s(self) -> float:
        """`created` in seconds since 1970."""
        # Python 3.10 does not read the "Z" that other programs may write.
        created = datetime.fromisoformat(re.sub("Z$", "+00:00", self.created))
        if created.tzinfo is None:
            raise ValueError(f"the attribute created is {self.created!r}, without a time zone")
        return created.timestamp()

    def check(self) -> None:
        """Raise ValueError for attributes that no program can have written."""
        if self.step < -1:
            raise ValueError(f"the attribute step is {self.step}")
        if self.num_replicas < 1:
            raise ValueError(f"the attribute num_replicas is {self.num_replicas}")
        if not self.mpistrat_version or not self.mpi_library:
            raise ValueError("the attribute mpistrat_version or mpi_library is empty")
        _ = self.created_s


@dataclass(frozen=True)
class VariableInfo:
    """What a file says about one variable, without its values."""

    shape: tuple[int, ...]
    dtype: np.dtype
    """Dtype in the machine's byte order."""
    synchronization: str
    """Name of a `VariableSynchronization`."""
    aggregation: str
    """Name of a `VariableAggregation`."""
    trainable: bool
    digest: str
    """Digest of the stored bytes in C order; see `mpistrat.checkpoint.digests`."""
    tensor_dtype: str = ""
    """Dtype of these bytes in the program, if HDF5 has no such dtype."""

    def __post_init__(self) -> None:
        if self.synchronization not in VariableSynchronization.__members__:
            raise ValueError(f"the attribute synchronization is {self.synchronization!r}")
        if self.aggregation not in VariableAggregation.__members__:
            raise ValueError(f"the attribute aggregation is {self.aggregation!r}")
        if not is_digest(self.digest):
            raise ValueError(f"the attribute digest is {self.digest!r}")
        if BITS_OF_FLOATS.get(self.tensor_dtype, self.dtype) != self.dtype:
            raise ValueError(f"the attribute dtype is {self.tensor_dtype!r}")
        if not is_storable(self.dtype):
            raise ValueError(f"the dtype is {self.dtype}, which no variable has")

    @property
    def dtype_name(self) -> str:
        """The name of the dtype that the values have in the program."""
        is_known = self.tensor_dtype in BITS_OF_FLOATS
        return self.tensor_dtype if is_known else str(self.dtype)

    @property
    def size_bytes(self) -> int:
        """Size of the values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def is_storable(dtype: np.dtype) -> bool:
    """Return whether variables of `dtype` can be stored: numbers and booleans."""
    return dtype.kind in "biufc"


def check_path(path: str) -> None:
    """Raise for an object path that HDF5 cannot hold."""
    if not all(map(is_path_part, path.split("/"))):
        raise ValueError(
            f"{path!r} cannot be the path of an object in a checkpoint: no part of it may be "
            "empty, '.' or '..', and it may hold no zero byte. Rename the object or dict key."
        )
    num_parts = path.count("/") + 1
    if num_parts >= DEEPEST:  # the group of all variables is also a level
        raise ValueError(
            f"{path[:40] + '...'!r} cannot be the path of an object in a checkpoint: it has "
            f"{num_parts} parts, and the most that can be read is {DEEPEST - 1}. Keep the object "
            "in a flatter structure."
        )


def is_path_part(name: str) -> bool:
    """Return whether `name` can stand between two ``/`` of an object path."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def checked_path(what: str, path: str | os.PathLike[str]) -> str:
    """Return the path of a file as a string, unchanged, or raise why it is not a path."""
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(name, str):
        raise TypeError(f"{what} needs a path as a string or pathlib.Path, not {path!r}.")
    if not name or "\0" in name:
        raise ValueError(f"{what} needs a path, but {name!r} is none.")
    return name
