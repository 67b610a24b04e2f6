"""Iterators over datasets, and their position, which checkpoints save."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from mpistrat import nests, values
from mpistrat.arguments import as_integer
from mpistrat.errors import OutOfRangeError
from mpistrat.tracing.spans import span


class Position:
    """The number of the pass, from 0 on, and how many of its elements were returned."""

    # Each iteration begins the next pass, even if a loop has left the previous one early. Only the
    # first iteration of all, and the first after a restore, resume the pass of the position.

    def __init__(self) -> None:
        self._pass = 0
        self._num_handed_out = 0
        self._is_resuming = True
        self._latest: object = None

    def begin(
        self, on_empty: Callable[[], None] | None = None
    ) -> tuple[int, int, Callable[[bool], None]]:
        """Return the pass, how many elements to skip, and a function to call after each element.

        `on_empty` is called at the end of a pass that has no element.
        """
        if not self._is_resuming:
            self._pass, self._num_handed_out = self._pass + 1, 0
        self._is_resuming = False
        self._latest = mark = object()

        def on_step(has_element: bool) -> None:
            # Only the newest iterator moves the position.
            if self._latest is not mark:
                return
            if has_element:
                self._num_handed_out += 1
            else:
                if not self._num_handed_out and on_empty is not None:
                    on_empty()
                self._pass, self._num_handed_out = self._pass + 1, 0
                self._is_resuming = True
                # An iterator that has ended may be asked again; that must not end one more epoch.
                self._latest = None

        return self._pass, self._num_handed_out, on_step

    def __str__(self) -> str:
        if not self._pass and not self._num_handed_out:
            return ""
        return f", at element {self._num_handed_out} of pass {self._pass}"

    def state(self, layout: dict[str, Any]) -> dict[str, Any]:
        """Return the position, and the settings `layout` for which it is valid, as JSON values."""
        return {"pass": self._pass, "batch": self._num_handed_out, **layout}

    def load(self, state: dict[str, Any], layout: dict[str, Any], length: int) -> None:
        """Resume at `state` in a dataset with `layout` and passes of `length`."""
        # A negative length means that it is endless or unknown.
        if not isinstance(state, dict):
            raise TypeError(f"The position of a dataset is a dict, not {state!r}.")
        missing = {"pass", "batch"} - set(state)
        if missing:
            raise ValueError(f"The position of a dataset needs {sorted(missing)}, not {state!r}.")
        pass_number = as_integer("pass", state["pass"], 0)
        num_handed_out = as_integer("batch", state["batch"], 0)
        saved = {key: state[key] for key in state if key not in ("pass", "batch")}
        # At the beginning of an epoch nothing has been skipped, so any order will do.
        if num_handed_out:
            _check_layout(saved, layout)
        if 0 <= length < num_handed_out:
            raise ValueError(
                f"The position is after {num_handed_out} batches, but an epoch has {length}: the "
                "data have changed."
            )
        self._pass, self._num_handed_out = pass_number, num_handed_out
        self._is_resuming = True
        # An iterator that was created before must not move the position that was loaded.
        self._latest = None


def _check_layout(saved: dict[str, Any], layout: dict[str, Any]) -> None:
    if saved == layout:
        return
    differing = [
        f"{key} was {saved.get(key)} and is now {layout.get(key)}"
        for key in sorted(saved.keys() | layout.keys())
        if key != "order" and saved.get(key) != layout.get(key)
    ]
    # The digest of the order includes the batch size, which says more by itself.
    why = "; ".join(differing) or "the files, the seed or the steps of the dataset differ"
    raise ValueError(
        f"The position is in the middle of an epoch of a different dataset: {why}. Use the same "
        "dataset, or a checkpoint from the end of an epoch, which fits every dataset."
    )


_NOTHING = object()


class Optional:
    """An element, or nothing."""

    def __init__(self, value: Any = _NOTHING) -> None:
        self._value = value

    def has_value(self) -> bool:
        """Return whether there is an element. Local."""
        return self._value is not _NOTHING

    def get_value(self) -> Any:
        """Return the element. Local.

        Raises
        ------
        OutOfRangeError
            If there is none.
        """
        if self._value is _NOTHING:
            raise OutOfRangeError(
                "The epoch has ended, so there is no value. Ask has_value() first."
            )
        return self._value


def _amount_of(element: Any) -> dict[str, int]:
    """Return the number of bytes, and the number of examples if it is a part of a global batch."""
    leaves, _ = nests.flatten(element)
    arrays: list[Any] = [values.local_component(leaf) for leaf in leaves]
    amount = {"bytes": sum(int(getattr(array, "nbytes", 0)) for array in arrays)}
    if leaves and isinstance(leaves[0], values.PerReplica) and getattr(arrays[0], "ndim", False):
        amount["examples"] = len(arrays[0])
    return amount


class ElementIterator:
    """One pass over a dataset.

    If the dataset is distributed, every rank must take the same number of elements. Taking one is
    **Local** if the lengths of all ranks' data are known, and **Collective** if they are not, as
    for generators passed to `distribute_datasets_from_function`. The end of a pass is
    **Collective**: if other ranks had an error in a batch, this rank raises an error there. Inside
    `Strategy.run`, and in the scope of a different strategy, taking an element raises
    `ContextError`.
    """

    def __init__(
        self,
        elements: Generator[Any, None, None],
        on_step: Callable[[bool], None],
        check_context: Callable[[], None] | None = None,
        of: object = None,
        on_element: Callable[[Any], None] | None = None,
    ) -> None:
        self._of = of
        self._on_element = on_element
        self._elements = elements
        self._on_step = on_step
        self._check_context = check_context

    def __iter__(self) -> ElementIterator:
        return self

    def __next__(self) -> Any:
        if self._check_context is not None:
            self._check_context()  # outside of the generator, because an error would end it
        try:
            with span("data", "next batch") as facts:
                element = next(self._elements)
                if facts is not None:
                    facts.update(_amount_of(element))
        except StopIteration:
            self._on_step(False)
            raise
        # The element is counted only now, so after an error the position is still before it.
        self._on_step(True)
        if self._on_element is not None:
            self._on_element(element)
        return element

    def close(self) -> None:
        """End the pass early: close files and end threads. Local."""
        self._elements.close()

    def __repr__(self) -> str:
        return f"<ElementIterator of {self._of!r}>"

    def get_next(self) -> Any:
        """Return the next element.

        Raises
        ------
        OutOfRangeError
            If there is none.
        """
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError(
                "The iterator has no further element: the epoch has ended. Create a new iterator "
                "with iter(...) for the next epoch."
            ) from None

    def get_next_as_optional(self) -> Optional:
        """Return an `Optional` with the next element, or an empty one at the end of the pass."""
        try:
            return Optional(next(self))
        except StopIteration:
            return Optional()
