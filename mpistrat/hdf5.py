"""HDF5 access: the only module that imports h5py, and only when it is first needed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import importlib
import mmap
import os
import re
import resource
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mpistrat.errors import DataError
from mpistrat.system.files import affixes, replace_file, umask

_BYTES_WORTH_ALIGNING = 2**18
"""Arrays of at least this many bytes begin at a memory page, so that no two writers share one."""


@functools.cache
def h5py() -> Any:
    """Return the h5py module, with the filters of hdf5plugin registered if it is installed."""
    _hdf5plugin()
    return importlib.import_module("h5py")


@functools.cache
def _hdf5plugin() -> Any:
    """Return hdf5plugin, an optional package, or ``None``."""
    try:
        return importlib.import_module("hdf5plugin")
    except ModuleNotFoundError as reason:
        if reason.name != "hdf5plugin":
            raise
        return None


@functools.cache
def plugin_libraries() -> dict[str, str]:
    """Return the libraries of the filters that hdf5plugin has registered, by name."""
    plugins = _hdf5plugin()
    registered = plugins.get_config().registered_filters if plugins is not None else {}
    return {name: path for name, path in registered.items() if os.path.isfile(path)}


def extension_path() -> str:
    """Return the path of the h5py library that contains its own filters."""
    return str(h5py().h5z.__file__)


def filters_of(dataset: Any) -> list[tuple[int, tuple[int, ...]]]:
    """Return number and client data of each filter of `dataset`, in the order of application."""
    properties = dataset.id.get_create_plist()
    filters = map(properties.get_filter, range(properties.get_nfilters()))
    return [(number, values) for number, _, values, _ in filters]


def filters_edge_chunks(dataset: Any) -> bool:
    """Return whether chunks beyond the edges of `dataset` are filtered like all others."""
    # See H5Pset_chunk_opts in the HDF5 reference, which h5py does not have.
    get_options = _chunk_options()
    if get_options is None:  # the library is linked into h5py and hidden there
        return True
    properties, options = dataset.id.get_create_plist(), ctypes.c_uint()
    with h5py()._objects.phil:  # HDF5 is not thread-safe
        get_options(properties.id, ctypes.byref(options))
    return not options.value & _UNFILTERED_EDGES


@functools.cache
def _chunk_options() -> Any:
    function = getattr(ctypes.CDLL(extension_path()), "H5Pget_chunk_opts", None)
    if function is not None:
        function.argtypes = [ctypes.c_int64, ctypes.c_void_p]
    return function


_UNFILTERED_EDGES = 2
"""``H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS``."""


def fills_unwritten(dataset: Any) -> bool:
    """Return whether HDF5 returns a value for elements of `dataset` that were never written."""
    # Otherwise it leaves the target memory unchanged (HDF5 reference, H5Pset_fill_time). A virtual
    # dataset behaves like its sources.
    h5d, properties = h5py().h5d, dataset.id.get_create_plist()
    has_value = properties.fill_value_defined() != h5d.FILL_VALUE_UNDEFINED
    is_filled = properties.get_fill_time() != h5d.FILL_TIME_NEVER
    return bool(has_value and is_filled and properties.get_layout() != h5d.VIRTUAL)


def is_stored_as(dataset: Any, dtype: Any) -> bool:
    """Return whether a low-level `dataset` has the same bytes as arrays of `dtype`."""
    # Objects, such as strings of any length, are pointers in memory and longer in files. NumPy
    # turns elements of an array type into further axes, and does not report their byte order.
    if dtype.hasobject or dtype.subdtype is not None:
        return False
    return bool(dataset.get_type().equal(stored_type(dtype)))


def memory_type(dtype: Any) -> Any:
    """Return the HDF5 type to read arrays of `dtype`, in which objects are Python objects."""
    return h5py().h5t.py_create(dtype)


def stored_type(dtype: Any) -> Any:
    """Return the HDF5 type for a `dtype`."""
    # Equal dtypes, or their fields, may differ in metadata, which h5py uses to mark strings and
    # references.
    has_none = dtype.metadata is None and dtype.names is None and dtype.subdtype is None
    return (_type_of if has_none else _type_of.__wrapped__)(dtype)


@functools.lru_cache(64)
def _type_of(dtype: Any) -> Any:
    return h5py().h5t.py_create(dtype, logical=True)


def is_in_file(dataset: Any, path: str) -> bool:
    """Return whether `dataset` is in the file `path` itself, and not behind an external link."""
    name = os.fsdecode(h5py().h5f.get_name(dataset.id))
    return name == path or os.path.samefile(name, path)


def contiguous_offset(dataset: Any, dtype: Any) -> int | None:
    """Return the offset of the elements of `dataset` in its file, ``None`` if not contiguous.

    They must be stored there like arrays of `dtype`.
    """
    # The offset includes a user block at the beginning of the file.
    if not has_offsets(dataset.id) or not is_stored_as(dataset.id, dtype):
        return None
    return offset_of_block(dataset.id, dataset.nbytes)


def has_offsets(node: Any) -> bool:
    """Return whether the file of a low-level node is read in the usual way."""
    access = h5py().h5i.get_file_id(node).get_access_plist()
    return bool(access.get_driver() == h5py().h5fd.SEC2)


def has_signature(path: str | os.PathLike[str]) -> bool:
    """Return whether a file has the signature of HDF5, possibly after a user block."""
    with open(path, "rb") as file:
        place, size = 0, os.fstat(file.fileno()).st_size
        while place < size:
            file.seek(place)
            if file.read(len(_SIGNATURE)) == _SIGNATURE:
                return True
            # The signature is at 0, 512, 1024, 2048 and so on (HDF5 file format, superblock).
            place = max(2 * place, _SMALLEST_USER_BLOCK)
    return False


_SIGNATURE, _SMALLEST_USER_BLOCK = b"\x89HDF\r\n\x1a\n", 512


def offset_of_block(dataset: Any, num_bytes: int) -> int | None:
    """Return the offset of the bytes of a low-level dataset, ``None`` if not contiguous."""
    offset = dataset.get_offset()  # none if they are in chunks, the header or other files
    if offset is None or not num_bytes:
        return None
    # If the sizes differ, nothing is allocated in the file yet.
    return int(offset) if dataset.get_storage_size() == num_bytes else None


def places_of_chunks(dataset: Any) -> list[tuple[int, int, int]] | None:
    """Return the places of the chunks along the first axis, ``None`` if some are not stored.

    Each place is the offset in the file, the size there and the filter mask.
    """
    if dataset.file.userblock_size or not has_offsets(dataset.id):
        return None  # HDF5 versions count from different origins
    if not hasattr(dataset.id, "chunk_iter"):  # before HDF5 1.10.10 and 1.12.3
        return None
    chunks: list[Any] = []
    dataset.id.chunk_iter(chunks.append)  # append returns None, so the iteration continues
    found = {offset[0]: (start, size, mask) for offset, mask, start, size in chunks}
    rows = range(0, len(dataset), dataset.chunks[0])
    try:
        return [found[row] for row in rows]
    except KeyError:
        return None


def max_open_files() -> int:
    """Return how many files this process may keep open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def open_for_reading(
    path: str | os.PathLike[str], error: type[Exception], swmr: bool = False
) -> Any:
    """Return an open ``h5py.File`` of `path`; with `swmr` it may be written at the same time."""
    if not os.path.isfile(path):  # opening a pipe would wait for its other end
        if os.path.isdir(path):
            raise error(f"{path} is a folder, but an HDF5 file was expected. Name a file in it.")
        if not os.path.exists(path):
            raise error(_explain_absence(Path(path)))
        raise error(f"{path} is a device or a pipe, but an HDF5 file was expected.")
    try:
        # The keyword is passed only if needed, because it requests a different kind of lock.
        return h5py().File(path, "r", swmr=True) if swmr else h5py().File(path, "r")
    except OSError as reason:
        raise error(_explain(Path(path), reason)) from reason


# HDF5 returns wrong rows if a file that is being written (SWMR) is open twice and one handle is
# refreshed. So all readers of a file share one handle, which is never refreshed. The last reader
# closes it, and the next reader finds the rows that were written since.
_live_lock = threading.Lock()
_live_handles: dict[str, tuple[Any, int]] = {}
"""Open files and their numbers of users, by path."""


def open_file(path: str, is_live: bool) -> Any:
    """Return an open file. Readers of a live file share it. Pass it to `close_file` at the end."""
    if not is_live:
        return open_for_reading(path, DataError)
    key = os.path.realpath(path)
    with _live_lock:
        file, num_users = _live_handles.get(key, (None, 0))
        if file is None:
            file = open_for_reading(path, DataError, swmr=True)
        _live_handles[key] = file, num_users + 1
    return file


def close_file(path: str, file: Any, is_live: bool) -> None:
    """Close a file that `open_file` has returned. A live file is closed after its last use."""
    if is_live:
        key = os.path.realpath(path)
        with _live_lock:
            num_users = _live_handles[key][1] - 1
            if num_users:
                _live_handles[key] = file, num_users
                return
            del _live_handles[key]
    file.close()


@contextlib.contextmanager
def opened_for_reading(path: str, is_live: bool) -> Iterator[Any]:
    """Open a file within the ``with`` block."""
    file = open_file(path, is_live)
    try:
        yield file
    finally:
        close_file(path, file, is_live)


def _explain_absence(path: Path) -> str:
    try:
        path.stat()
    except PermissionError:
        return explain_permission(path, " for a folder above it")
    except (OSError, ValueError):
        pass
    beginning = "" if path.is_absolute() else f"; it is relative to {Path.cwd()}"
    return f"There is no file {path}. Check the path{beginning}."


def _explain(path: Path, reason: OSError) -> str:
    text = str(reason)
    if "file signature not found" in text:
        return f"{path} is not an HDF5 file ({path.stat().st_size} bytes)."
    if "truncated" in text:
        return f"{path} is truncated: its end is missing. Copy or write it again."
    if "unable to lock file" in text and reason.errno in (errno.EAGAIN, errno.EACCES):
        return (
            f"{path} is open for writing in another program, which holds a lock on it. Wait until "
            "that program has closed the file, or copy it."
        )
    if "unable to lock file" in text:
        why = os.strerror(reason.errno) if reason.errno else text
        return (
            f"{path} is on a file system that cannot lock files ({why}). Set HDF5_USE_FILE_"
            "LOCKING=FALSE in the environment of every rank; nothing may write to it meanwhile."
        )
    if "already open for write" in text:
        return (
            f"{path} is being written, or its writer has died: it was not closed. Wait until the "
            "writer has closed it; if that is dead, h5clear -s clears the mark in the file. What "
            "is written with swmr_mode=True can be read meanwhile: from_hdf5(..., swmr=True)."
        )
    if reason.errno in (errno.EMFILE, errno.ENFILE):
        return (
            f"{path} cannot be opened: too many files are open. Raise the limit, "
            f"{max_open_files()} in this process, with ulimit -n, or close files."
        )
    if reason.errno == errno.EACCES:
        return explain_permission(path)
    return f"{path} cannot be opened as an HDF5 file: {text}."


def explain_permission(path: str | os.PathLike[str], where: str = "") -> str:
    """Return a message that this process may not read a file, with a remedy."""
    remedy = f"Let user {os.geteuid()} on {os.uname().nodename} read it; namei -l shows who may."
    return f"The file {path} cannot be read: permission denied{where}. {remedy}"


@contextlib.contextmanager
def create_atomically(
    path: str | os.PathLike[str],
    commit: Callable[[Path], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Iterator[Any]:
    """Open a new ``h5py.File`` that appears under `path` once it is complete and on disk.

    It gets its name inside the context ``commit(path)``, which may raise.
    """
    # It is written under a temporary name in the same folder, flushed, and renamed over `path`;
    # then the folder is flushed. After an exception `path` is unchanged. A symbolic link is kept,
    # and the file that it points to is replaced.
    path = Path(os.path.realpath(path) if os.path.islink(path) else path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a device or a pipe"
        raise OSError(errno.EEXIST, f"is {what}, but a file is to be written", str(path))
    prefix, suffix = affixes(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=suffix)
    try:
        os.fchmod(handle, 0o666 & ~umask())
        file = _create(temporary)
        try:
            yield file
            file.flush()  # if it fails, the file can still be closed
        except BaseException:
            _discard(file)
            raise
        file.close()
        os.fsync(handle)
        with commit(path):
            replace_file(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    finally:
        os.close(handle)
    _fsync_folder(path.parent)


def _create(path: str) -> Any:
    h5f, h5p = h5py().h5f, h5py().h5p
    access = h5p.create(h5p.FILE_ACCESS)
    # Closing the file closes all objects in it. With the default, the file would stay open as long
    # as the program holds an object.
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_V110)
    # Otherwise small arrays would be written when their dataset is closed, and no error could be
    # raised then.
    access.set_sieve_buf_size(0)
    access.set_alignment(_BYTES_WORTH_ALIGNING, mmap.PAGESIZE)
    return h5py().File(h5f.create(os.fsencode(path), h5f.ACC_TRUNC, fapl=access))


def error_text(reason: Exception) -> str:
    """Return the system's message in an error that the system or h5py has raised."""
    if isinstance(reason, OSError) and reason.strerror and "errno" not in reason.strerror:
        return f"{reason.strerror} ({reason.filename})" if reason.filename else reason.strerror
    found = re.search(r"error message = '([^']+)'", str(reason))
    return found[1] if found else str(reason)


def _discard(file: Any) -> None:
    """Close a file that is not needed, even if its disk is full."""
    # HDF5 writes when it closes. If that fails, it keeps the file open forever, in a state in which
    # any access crashes. So the remaining writes are redirected to memory.
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    sink = _open_sink()
    try:
        # The limit applies to memory as well. A process may raise its soft limit to the hard limit.
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit[1], limit[1]))
        os.dup2(sink, file.id.get_vfd_handle(), inheritable=False)
        with contextlib.suppress(OSError, RuntimeError):  # the hard limit may be too low as well
            file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        os.close(sink)


def _open_sink() -> int:
    """Return the handle of an unnamed file, in memory if the system supports that."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("discarded")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
