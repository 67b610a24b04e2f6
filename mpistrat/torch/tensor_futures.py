"""Futures of lists of tensors, as torch's C++ code expects them from a group.

A ``torch.futures.Future`` made in Python holds a Python object. DDP calls Python to find the
tensors in it, and the communication hooks that are written in C++ refuse it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

# TorchScript is the only way by which Python makes a future of another type than "Python object"
# that completes later. Its `fork` runs `ended` until the wait, and goes on once `begun` is done.
_SCRIPT = """
def ended(begun: Future[int], outputs: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(begun)
    return outputs

def once_done(begun: Future[int], outputs: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(ended, begun, outputs)
"""


def done(outputs: list[torch.Tensor]) -> torch.futures.Future[Any]:
    """Return a future that is complete."""
    future: torch.futures.Future[Any] = torch._C.fork(lambda: outputs)
    return future


@functools.cache
def warm_up() -> None:
    """Compile what `once_done` needs: 30 ms, which would fall into the first steps of a program."""
    # Without its `fork`, which starts threads of torch: after that a program cannot set their
    # number, and a process forked from it waits forever for its own forks.
    begun: torch.futures.Future[Any] = torch.futures.Future()
    begun.set_result(None)
    _compiled("ended")(begun, [])


def once_done(
    begun: torch.futures.Future[Any], outputs: list[torch.Tensor]
) -> torch.futures.Future[Any]:
    """Return a future that completes or fails with `begun`."""
    future: torch.futures.Future[Any] = _compiled("once_done")(begun, outputs)
    return future


def _compiled(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = _unit().find_function(name)
    return found


@functools.cache
def _unit() -> Any:
    unit = torch._C.CompilationUnit()
    unit.define(_SCRIPT, torch._jit_internal.createResolutionCallbackFromFrame(0))
    return unit
