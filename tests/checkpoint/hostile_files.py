"""Checkpoint files that somebody has made on purpose: each has one trick in it."""

import struct
import zlib

import h5py
import hdf5plugin
import numpy as np

from mpistrat.checkpoint.format import Header, digest_of_text
from mpistrat.checkpoint.writer import create_checkpoint, state_item, variable_item

KERNEL = np.arange(8, dtype=np.float32)
CHECKSUMMED = ("v110", "v110")
MODES = {
    "synchronization": "AUTO",
    "aggregation": "NONE",
    "trainable": True,
    "digest": f"xxh3-128:{0:032}",
}


def write_sound(path):
    with create_checkpoint(path, Header(step=1)) as writer:
        writer.add(variable_item("kernel", KERNEL))
        writer.add(variable_item("model/bias", KERNEL[:2]))
        writer.add(state_item("data", {"pass": 2}))


def add(file, name="variables/x", **options):
    dataset = file.create_dataset(name, **options)
    dataset.attrs.update(MODES)
    return dataset


def external_link(file, folder):
    file["variables/x"] = h5py.ExternalLink(folder / "other.h5", "secret")


def soft_link(file, folder):
    file["variables/x"] = h5py.SoftLink("/state/data")


def dangling_link(file, folder):
    file["variables/x"] = h5py.SoftLink("/../../etc/passwd")


def cycle(file, folder):
    file["variables/model/up"] = file["variables"]


def cycle_through_the_root(file, folder):
    file["variables/model/up"] = file["/"]


def second_name(file, folder):
    file["variables/x"] = file["variables/kernel"]


def named_type(file, folder):
    file["variables/x"] = np.dtype("f4")


def parent_as_a_name(file, folder):
    add(file, "variables/../../x", data=KERNEL)


def deep_groups(file, folder):
    group = file["variables"].id
    for _ in range(30_000):
        group = h5py.h5g.create(group, b"g")


def external_storage(file, folder):
    add(file, shape=(16,), dtype="f4", external=[(folder / "other.h5", 0, 64)])


def external_text(file, folder):
    del file["state/data"]
    external = [(folder / "other.h5", 0, 64)]
    add(file, "state/data", shape=(1,), dtype=h5py.string_dtype("utf-8", 64), external=external)


def virtual(file, folder):
    layout = h5py.VirtualLayout((8,), "f4")
    layout[:] = h5py.VirtualSource(folder / "other.h5", "secret", (8,))
    file.create_virtual_dataset("variables/x", layout).attrs.update(MODES)


def virtual_text(file, folder):
    del file["state/data"]
    dtype = h5py.string_dtype("utf-8", 8)
    layout = h5py.VirtualLayout((), dtype)
    layout[()] = h5py.VirtualSource(folder / "other.h5", "text", (), dtype)
    file.create_virtual_dataset("state/data", layout).attrs.update(MODES)


def huge_shape(file, folder):
    add(file, shape=(2**50,), dtype="f8")


def huge_chunked_shape(file, folder):
    add(file, shape=(2**30, 2**12), dtype="f8", chunks=(2**20, 2**8))


def huge_chunk(file, folder):
    add(file, shape=(1,), maxshape=(None,), chunks=(2**29 - 1,), dtype="f8")


def countless_chunks(file, folder):
    add(file, shape=(2**24,), chunks=(1,), dtype="f8")


def huge_text(file, folder):
    add(file, "state/x", shape=(), dtype=h5py.string_dtype("utf-8", 2**30))


def bomb(file, folder):
    chunk = zlib.compress(bytes(2**25), 9)
    dataset = add(file, shape=(2**31,), chunks=(2**25,), dtype="u1", compression="gzip")
    for start in range(0, 2**31, 2**25):
        dataset.id.write_direct_chunk((start,), chunk)


def endless_stream(file, folder):
    packer = zlib.compressobj(9)
    head = packer.compress(b"") + packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)
    del file["variables/kernel"]
    dataset = add(file, "variables/kernel", shape=(8,), chunks=(8,), dtype="f4", compression=1)
    dataset.id.write_direct_chunk((0,), head + 4096 * block)


def stacked_filters(file, folder):
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((8,))
    properties.set_deflate(1)
    properties.set_deflate(1)
    make(file, h5py.h5t.NATIVE_FLOAT, (8,), properties)


def unknown_filter(file, folder):
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((8,))
    properties.set_filter(511, h5py.h5z.FLAG_OPTIONAL, (1,))
    make(file, h5py.h5t.NATIVE_FLOAT, (8,), properties)


def filter_of_a_plugin(file, folder):
    add(file, data=KERNEL, chunks=(8,), **hdf5plugin.Blosc())


def filter_that_loses_bits(file, folder):
    add(file, data=KERNEL.astype("i4"), chunks=(8,), scaleoffset=2)


def make(file, dtype, shape, properties=None):
    space = h5py.h5s.create_simple(shape)
    dataset = h5py.h5d.create(file.id, b"/variables/x", dtype, space, dcpl=properties)
    h5py.Dataset(dataset).attrs.update(MODES)


def references(file, folder):
    add(file, data=np.array([file.ref] * 2, h5py.ref_dtype))


def regions(file, folder):
    add(file, data=[file["variables/kernel"].regionref[:2]], dtype=h5py.regionref_dtype)


def varying_lengths(file, folder):
    add(file, shape=(2,), dtype=h5py.vlen_dtype("f4"))


def texts(file, folder):
    add(file, data=["text"] * 2, dtype=h5py.string_dtype())


def fixed_texts(file, folder):
    add(file, data=np.array([b"text"] * 2))


def opaque(file, folder):
    add(file, data=np.array([b"text"], "V4"))


def dates(file, folder):
    add(file, data=np.array([1], "M8[s]").astype(h5py.opaque_dtype("M8[s]")))


def compound(file, folder):
    add(file, data=np.zeros(2, [("name", "f4"), ("id", "i4")]))


def arrays_as_items(file, folder):
    add(file, data=np.zeros(2, [("name", "f4", (3,))]))
    make_array = h5py.h5t.array_create(h5py.h5t.NATIVE_FLOAT, (2**20,))
    del file["variables/x"]
    make(file, make_array, (1,))


def without_values(file, folder):
    add(file, data=h5py.Empty("f4"))


def odd_attributes(file, folder):
    del file["variables/kernel"].attrs["digest"]
    file["variables/kernel"].attrs["digest"] = file.ref


def list_as_attribute(file, folder):
    del file["variables/kernel"].attrs["aggregation"]
    file["variables/kernel"].attrs["aggregation"] = ["SUM"] * 3


def deep_json(file, folder):
    state(file, b"[" * 100_000 + b"]" * 100_000)


def number_of_a_million_digits(file, folder):
    state(file, b"9" * 1_000_000)


def state(file, text):
    if "state/data" in file:
        del file["state/data"]
    file["state/data"] = np.bytes_(text)
    file["state/data"].attrs["digest"] = digest_of_text(text)


TRICKS = {
    external_link: "is a link",
    soft_link: "is a link",
    dangling_link: "is a link",
    cycle: "second name",
    cycle_through_the_root: "second name",
    second_name: "second name",
    named_type: "neither a group nor a dataset",
    parent_as_a_name: "has a name that no object can have",
    deep_groups: "is nested in more than 100 groups",
    external_storage: "in other files",
    external_text: "in other files",
    virtual: "in other files",
    virtual_text: "in other files",
    huge_shape: "larger than the file",
    huge_chunked_shape: "chunks, more than the file",
    huge_chunk: "larger than the file",
    countless_chunks: "chunks, more than the file",
    huge_text: "larger than the file",
    bomb: "larger than the file",
    endless_stream: "unpacks to more than its 32 bytes",
    stacked_filters: "filters deflate, deflate",
    unknown_filter: "filters 511",
    filter_of_a_plugin: "filters blosc",
    filter_that_loses_bits: "filters scaleoffset",
    references: "dtype is object",
    regions: "dtype is object",
    varying_lengths: "dtype is object",
    texts: "dtype is object",
    fixed_texts: "dtype is |S4",
    opaque: "dtype is |V4",
    dates: "dtype is datetime64",
    compound: "dtype is [('name'",
    arrays_as_items: "dtype is ('<f4', (1048576,))",
    without_values: "it has no values",
    odd_attributes: "attribute digest is 'None'",
    list_as_attribute: "attribute aggregation is 'None'",
    deep_json: "recursion",
    number_of_a_million_digits: "limit",
}


def write_repeated_names(path):
    """Give a state a list of names that are all the same text, which the file holds once.

    Texts of variable length in a list are not read, so the file is as good as without.
    """
    write_sound(path)
    long = "n" * 2**20
    with h5py.File(path, "r") as sound, h5py.File(f"{path}.old", "w", libver="earliest") as file:
        file.attrs.update(sound.attrs)
        sound.copy("variables", file)
        # Made again: what is copied has a checksum.
        state(file, sound["state/data"][()])
        names = np.array([long] + ["short"] * 3000, object)
        file["state/data"].attrs.create("arrays", names, dtype=h5py.string_dtype())
    with open(f"{path}.old", "rb") as opened:
        data = opened.read()
    text = data.find(long.encode())
    number = int.from_bytes(data[text - 16 : text - 14], "little")
    place = struct.pack("<IQI", len(long), data.rfind(b"GCOL", 0, text), number)
    at = data.index(place)
    with open(path, "wb") as opened:
        opened.write(data[:at] + 3001 * place + data[at + 3001 * len(place) :])


def write_all(folder):
    """Write a file for each trick, and return the words that its refusal must have, by path.

    One whose trick has no effect is not refused, and has no words.
    """
    with h5py.File(folder / "other.h5", "w") as other:
        other["secret"] = KERNEL
        other["text"] = np.bytes_(b'{"a": 1}')
    expected = {}
    for trick, words in TRICKS.items():
        path = folder / f"{trick.__name__}.h5"
        write_sound(path)
        with h5py.File(path, "r+", libver=CHECKSUMMED) as file:
            trick(file, folder)
        expected[str(path)] = words
    path = folder / "repeated_names.h5"
    write_repeated_names(path)
    return expected | {str(path): ""}
