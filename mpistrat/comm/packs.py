"""Packs: which arrays of a nest travel together in one message. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

__all__ = ["plan_packs"]


def plan_packs(
    num_bytes: Sequence[int], keys: Sequence[Hashable], bytes_per_pack: int
) -> list[list[int]]:
    """Group arrays into messages.

    Arrays share a message if they have the same key (the dtype that travels), in the order
    given, up to `bytes_per_pack`. A larger array travels alone. Local.

    Parameters
    ----------
    num_bytes : sequence of int
        The size of each array.
    keys : sequence of hashable
        What must be equal in a message, for each array.
    bytes_per_pack : int
        Size limit of a message of several arrays.

    Returns
    -------
    list of list of int
        The positions of the arrays in each message. Every position occurs once.
    """
    packs: list[list[int]] = []
    open_packs: dict[Hashable, tuple[list[int], int]] = {}
    for position, (size, key) in enumerate(zip(num_bytes, keys, strict=True)):
        pack, filled = open_packs.get(key, (None, 0))
        if pack is None or filled + size > bytes_per_pack:
            pack, filled = [], 0
            packs.append(pack)
        pack.append(position)
        open_packs[key] = (pack, filled + size)
    return packs
