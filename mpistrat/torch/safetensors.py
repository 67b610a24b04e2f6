"""Export of checkpoints to safetensors files, and import of such files."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from typing import Any

import torch

from mpistrat.checkpoint.format import VariableInfo
from mpistrat.checkpoint.reader import CheckpointReader, naming_damage, open_checkpoint
from mpistrat.checkpoint.state_json import tied_paths, value_paths
from mpistrat.errors import CheckpointError
from mpistrat.system.files import write_atomically

_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
"""The name of each dtype in a safetensors file."""

_ALIGNMENT = 8
_MOST_SHOWN = 5


def export_safetensors(
    checkpoint_path: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    prefix: str = "model",
) -> None:
    """Write the tensors of one object in a checkpoint to a safetensors file.

    **Local**: call it on one rank. Tensors are copied piece by piece, so the memory needed does not
    depend on their sizes, and their digests are checked during the copy. Of tied tensors only the
    one whose name comes first is written. As in ``safetensors.torch.save_model``, the metadata then
    hold ``{other name: this name}``. The file appears complete or not at all.

    Parameters
    ----------
    checkpoint_path : str or path
        A file that `mpistrat.Checkpoint` has written.
    path : str or path
        The file to write, or replace.
    prefix : str
        Path of the object in the checkpoint. The names of the tensors do not contain it.

    Raises
    ------
    CheckpointError
        If the file is not a checkpoint, or has nothing below `prefix`.
    CheckpointCorruptError
        If it is damaged.
    TypeError
        If the object has state that is not a tensor, or a dtype that safetensors does not have.

    Examples
    --------
    >>> ms.Checkpoint(model=torch.nn.Linear(64, 10)).write("model.h5")
    'model.h5'
    >>> mst.export_safetensors("model.h5", "model.safetensors")
    """
    with open_checkpoint(checkpoint_path) as reader:
        infos, names = _contents(reader, prefix)
        write_atomically(path, _pieces(reader, prefix, infos, names))


def _contents(
    reader: CheckpointReader, prefix: str
) -> tuple[dict[str, VariableInfo], dict[str, list[str]]]:
    """Return the tensors of an object by name, and the names of each: its own and tied ones."""
    begin = f"{prefix}/"
    infos = {
        name.removeprefix(begin): info
        for name, info in reader.variables.items()
        if name.startswith(begin)
    }
    if not infos:
        known = sorted({name.partition("/")[0] for name in reader.variables})
        raise CheckpointError(
            f"The checkpoint {reader.path} has no tensors below prefix={prefix!r}. It has some "
            f"below {', '.join(map(repr, known)) or 'nothing'}."
        )
    others = [f"{name} ({info.dtype})" for name, info in infos.items() if not _code(info)]
    names = {name: [name] for name in infos}
    for owner in reader.state_paths:
        if f"{owner}/".startswith(begin):
            where = f"{owner}/".removeprefix(begin)
            rest = reader.read_state(owner)
            with naming_damage(reader.path, owner):
                for name, of in tied_paths(rest).items():
                    names[where + of].append(where + name)
            others += [where + name for name in value_paths(rest) if where + name not in infos]
    if others:
        shown = ", ".join(others[:_MOST_SHOWN]) + (", ..." if others[_MOST_SHOWN:] else "")
        raise TypeError(
            f"A safetensors file holds only tensors of real numbers, booleans and complex64, but "
            f"{prefix!r} in {reader.path} also has {shown}. Save an object without them."
        )
    return infos, names


def _code(info: VariableInfo) -> str | None:
    return _CODES.get(info.tensor_dtype or info.dtype.name)


def _pieces(
    reader: CheckpointReader,
    prefix: str,
    infos: dict[str, VariableInfo],
    names: dict[str, list[str]],
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the file."""
    metadata = {"format": "pt"}
    header: dict[str, Any] = {"__metadata__": metadata}
    # The widest first, as safetensors writes them, so that each is aligned.
    order = sorted(infos, key=lambda name: (-infos[name].dtype.itemsize, name))
    begin = 0
    for name in order:
        info, (kept, *removed) = infos[name], sorted(names[name])
        metadata |= dict.fromkeys(removed, kept)
        end = begin + info.size_bytes
        header[kept] = {
            "dtype": _code(info),
            "shape": list(info.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header).encode()
    # The format pads its header with spaces, so that the first tensor is aligned.
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in order:
        for piece in reader.read_pieces(f"{prefix}/{name}"):
            # The format is little-endian.
            yield piece.astype(piece.dtype.newbyteorder("<"), copy=False).view("u1").data


def import_safetensors(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file by name, on the host.

    **Local**. The tensors are mapped from the file one by one, and read when they are used. If
    `export_safetensors` or ``safetensors.torch.save_model`` left out names because their tensors
    were tied, these names are restored, and refer to the same tensor.

    Parameters
    ----------
    path : str or path
        The file to read.

    Returns
    -------
    dict of str to torch.Tensor
        The tensors by name.

    Raises
    ------
    ImportError
        If the package safetensors is not installed.
    safetensors.SafetensorError
        If the file is damaged.

    Examples
    --------
    >>> model = torch.nn.Linear(64, 10)
    >>> safetensors.torch.save_file(model.state_dict(), "linear.safetensors")
    >>> model.load_state_dict(mst.import_safetensors("linear.safetensors"))
    <All keys matched successfully>
    """
    with _package().safe_open(os.fspath(path), framework="pt") as file:
        names = file.keys()
        tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in names}
        metadata = file.metadata() or {}
    for name, kept in metadata.items():
        if name != "format" and kept in tensors:
            tensors.setdefault(name, tensors[kept])
    return tensors


def _package() -> Any:
    try:
        return importlib.import_module("safetensors")
    except ImportError as reason:
        raise ImportError(
            "import_safetensors needs the package safetensors, which is not installed here. "
            "Install it: pip install safetensors"
        ) from reason
