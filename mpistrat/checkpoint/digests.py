"""Digests of the contents of a checkpoint: XXH3-128 over pages.

A digest inside a file shows accidental damage. It cannot show a deliberate change, since whoever
changes the values can change the digest too. So the fastest good digest is enough. Values larger
than a page have a digest per page, which threads and ranks compute independently; the digest of the
whole is the digest of its page digests.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from mpistrat.system.text import rank_spans
from mpistrat.system.xxh3 import xxh3_128, xxh3_128_hexdigest

PAGE_BYTES = 2**22
"""Number of bytes of one page; the last page of an array may be shorter."""
DIGEST_BYTES = 16
"""Number of bytes of the digest of one page."""

_WHOLE = "xxh3-128:"
_PAGED = "xxh3-128-4MiB:"
_FORMS = re.compile(f"(?:{_WHOLE}|{_PAGED})[0-9a-f]{{32}}")


class ArrayDigest(NamedTuple):
    """The digest of an array."""

    text: str
    """The value of the attribute ``digest``."""
    pages: str = ""
    """The digests of its pages in hexadecimal, one after the other; empty if one page holds all."""

    def page_digests(self) -> np.ndarray:
        """Return the digests of the pages as uint8 of shape (pages, 16)."""
        found = np.frombuffer(bytes.fromhex(self.pages), np.uint8)
        return found.reshape(-1, DIGEST_BYTES)


class PagedHash:
    """XXH3-128 of values that arrive in order, in parts of any size: per page, and of all."""

    def __init__(self) -> None:
        self._pages: list[bytes] = []
        """The digests of the pages that are complete."""
        self._page = xxh3_128()
        self._left = PAGE_BYTES
        """Number of bytes until the current page is full."""

    def update(self, part: np.ndarray) -> None:
        """Add the next bytes, the contents of a contiguous array."""
        data = memoryview(part.reshape(-1).view(np.uint8).data)
        while data:
            # A full page is closed only when more bytes arrive. `result` closes the last page,
            # which would otherwise be an empty page after a full one.
            if not self._left:
                self._close_page()
            here = data[: self._left]
            self._page.update(here)
            self._left -= len(here)
            data = data[len(here) :]

    def _close_page(self) -> None:
        self._pages.append(self._page.digest())
        self._page = xxh3_128()
        self._left = PAGE_BYTES

    def result(self) -> ArrayDigest:
        """Return the digest of all parts so far."""
        return digest_of_page_digests(b"".join([*self._pages, self._page.digest()]))


def digest_of_array(array: np.ndarray) -> ArrayDigest:
    """Return the digest of the bytes of `array` in C order."""
    hasher = PagedHash()
    hasher.update(np.ascontiguousarray(array))
    return hasher.result()


def digest_of_text(text: bytes) -> str:
    """Return the digest of a string in UTF-8; a string has no pages, however long it is."""
    return _WHOLE + xxh3_128_hexdigest(text)


def digest_of_pages(pages: bytes) -> str:
    """Return the digest of values from the digests of their pages, one after the other."""
    return _PAGED + xxh3_128_hexdigest(pages)


def digest_of_page_digests(pages: bytes) -> ArrayDigest:
    """Return the digest of an array from the digests of all its pages, one after the other."""
    if len(pages) == DIGEST_BYTES:
        return ArrayDigest(_WHOLE + pages.hex())
    return ArrayDigest(digest_of_pages(pages), pages.hex())


def page_digests_of(digest: ArrayDigest) -> bytes:
    """Return the digests of the pages of an array, one after the other."""
    return bytes.fromhex(digest.pages or digest.text.removeprefix(_WHOLE))


def is_digest(text: object) -> bool:
    """Return whether `text` has the form of a digest."""
    return isinstance(text, str) and _FORMS.fullmatch(text) is not None


def is_paged(digest: str) -> bool:
    """Return whether a digest was taken over page digests."""
    return digest.startswith(_PAGED)


def differing_pages(found: ArrayDigest, stored: np.ndarray) -> str:
    """Return the numbers of the pages whose digests differ, as text."""
    differs = (found.page_digests() != stored).any(axis=1)
    return ", ".join(
        str(first) if first == last else f"{first}-{last}"
        for first, last in rank_spans(np.flatnonzero(differs).tolist())
    )


def check_digest(found: str, stored: str) -> None:
    """Raise ValueError unless `found` is equal to the digest that the file has stored."""
    if found != stored:
        raise ValueError("the values do not have the digest that was stored with them")
