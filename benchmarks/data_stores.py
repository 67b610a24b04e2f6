"""Ways of others to read in order with threads, or shuffled with a pipeline of their own.

pyfive reads HDF5 in plain Python, outside of the library's lock. VirtualiZarr and icechunk describe
the chunks of an HDF5 file to zarr, whose pipeline in Rust, zarrs, decodes them. Grain reads
ArrayRecord.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data_peers import IMAGE_SHAPE, NUM_THREADS, write_records
from mpistrat.bench.data import BATCH_SIZE

_Read = Callable[[], None]


def store_reads(folder: Path) -> dict[str, _Read]:
    """Return functions that read the images, of those packages that are installed."""
    reads: dict[str, _Read] = {}
    threads = f"{NUM_THREADS} threads"
    for name in ("gzip", "chunks", "contiguous"):
        if _has("pyfive"):
            read = partial(_read_pyfive, folder / f"{name}.h5")
            reads[f"pyfive, in order, {threads}, {name}"] = read
    if _has("virtualizarr", "icechunk", "zarrs", "obstore"):
        for name in ("gzip", "chunks"):  # a contiguous dataset is one chunk to zarr
            read = partial(_read_zarr, _open_virtual(folder, name))
            reads[f"zarrs over icechunk, in order, {name}"] = read
    if _has("grain", "array_record"):
        reads[f"Grain with ArrayRecord, shuffled, {threads}, gzip"] = _grain(folder)
    return reads


def _has(*names: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in names)


def _read_pyfive(path: Path) -> None:
    """Read all batches in the order of the file, each in a thread."""
    file = importlib.import_module("pyfive").File(str(path))
    image, label = file["image"], file["label"]

    def read(first: int) -> Any:
        return image[first : first + BATCH_SIZE], label[first : first + BATCH_SIZE]

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for _batch in pool.map(read, range(0, image.shape[0], BATCH_SIZE)):
            pass


@contextmanager
def _quiet() -> Iterator[None]:
    # The codecs of HDF5 are not in zarr's specification, of which zarr warns each time.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _open_virtual(folder: Path, name: str) -> Any:
    """Return a zarr group whose chunks are those of an HDF5 file."""
    os.environ.setdefault("ICECHUNK_LOG", "error")
    icechunk, zarr = importlib.import_module("icechunk"), importlib.import_module("zarr")
    importlib.import_module("zarrs")
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    registry = importlib.import_module("obspec_utils.registry").ObjectStoreRegistry
    files = importlib.import_module("obstore.store").LocalStore()
    parser = importlib.import_module("virtualizarr.parsers").HDFParser()
    place = f"file://{folder}/"
    container = icechunk.VirtualChunkContainer(place, icechunk.local_filesystem_store(str(folder)))
    config = icechunk.RepositoryConfig.default()
    config.set_virtual_chunk_container(container)
    repository = icechunk.Repository.create(
        icechunk.local_filesystem_storage(str(folder / f"{name}.icechunk")),
        config=config,
        authorize_virtual_chunk_access={place: None},
    )
    session = repository.writable_session("main")
    with _quiet():
        found = importlib.import_module("virtualizarr").open_virtual_dataset(
            url=f"file://{folder}/{name}.h5",
            registry=registry({"file://": files}),
            parser=parser,
        )
        found.vz.to_icechunk(session.store)
        session.commit("the chunks of the file")
        return zarr.open_group(repository.readonly_session("main").store, mode="r")


def _read_zarr(group: Any) -> None:
    with _quiet():
        image, label = group["image"], group["label"]
        for first in range(0, image.shape[0], BATCH_SIZE):
            _batch = image[first : first + BATCH_SIZE], label[first : first + BATCH_SIZE]


def _grain(folder: Path) -> _Read:
    """Write the images as ArrayRecord, and return what reads them shuffled by Grain."""
    grain = importlib.import_module("grain")
    source = grain.sources.ArrayRecordDataSource(write_records(folder))
    options = grain.ReadOptions(num_threads=NUM_THREADS, prefetch_buffer_size=BATCH_SIZE)

    def decode(record: bytes) -> np.ndarray:
        return np.frombuffer(record, np.uint8).reshape(IMAGE_SHAPE)

    def read() -> None:
        images = grain.MapDataset.source(source).shuffle(seed=0).map(decode)
        for _batch in images.batch(BATCH_SIZE).to_iter_dataset(options):
            pass

    return read
