"""C kernels of the element-wise updates, compiled by setup.py and, for the device, by CuPy.

setup.py runs this file by itself, so it imports nothing but the standard library.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Kernel:
    """The update of one element, as C statements on variables of one floating type."""

    name: str
    slots: tuple[str, ...]
    """Variables besides ``weight`` that are kept from step to step."""
    constants: tuple[str, ...]
    """Numbers that are equal for all elements."""
    body: str
    """Statements that read ``gradient`` and the constants, and write ``weight`` and the slots.

    They round in the same places as `Rule.in_numpy`, so that a rank without the library computes
    the same bits."""


SGD = Kernel("sgd", (), ("rate",), "weight -= rate * gradient;")
SGD_MOMENTUM = Kernel(
    "sgd_momentum",
    ("momentum",),
    ("rate", "decay"),
    "momentum = decay * momentum + rate * gradient; weight -= momentum;",
)
SGD_NESTEROV = Kernel(
    "sgd_nesterov",
    ("momentum",),
    ("rate", "decay"),
    "momentum = decay * momentum + rate * gradient;"
    " weight -= rate * gradient; weight -= decay * momentum;",
)
ADAM = Kernel(
    "adam",
    ("first_moment", "second_moment"),
    ("rate", "gain_1", "gain_2", "epsilon"),
    "first_moment += gain_1 * (gradient - first_moment);"
    " second_moment += gain_2 * (gradient * gradient - second_moment);"
    " weight -= rate * (first_moment / (sqrt(second_moment) + epsilon));",
)

_C_TYPES = {"f": "float", "d": "double", "g": "long double"}
"""C types by NumPy's character for the dtype."""

_HEAD = """\
/* Made by setup.py from mpistrat/optimizers/kernels.py. */
#include <stddef.h>
#include <tgmath.h>

/* One function for each instruction set, chosen when it is loaded. None fuses a product with a
   sum, so all give the same bits: the ranks of a job may run on different processors. */
#if defined(__x86_64__) && defined(__GNUC__) && defined(__gnu_linux__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif
"""


def c_source() -> str:
    """Return a C file with a function ``<kernel>_<dtype character>`` for each kernel and type."""
    # Each function updates a list of weights. Its arguments are their number and sizes, the
    # addresses of the gradients, the addresses of each weight and its slots in turn, and the
    # numbers.
    functions = [
        _functions(kernel, char, c_type)
        for kernel in (SGD, SGD_MOMENTUM, SGD_NESTEROV, ADAM)
        for char, c_type in _C_TYPES.items()
    ]
    text = "\n".join([_HEAD, *functions])
    made_from = hashlib.sha256(text.encode()).hexdigest()
    return f'{text}\nconst char mpistrat_digest[] = "{made_from}";\n'


def digest() -> str:
    """Return the value of ``mpistrat_digest`` in a library built from the current `c_source`."""
    return c_source().rpartition('= "')[2].partition('"')[0]


def _functions(kernel: Kernel, char: str, c_type: str) -> str:
    name = f"{kernel.name}_{char}"
    names, numbers = ("weight", *kernel.slots), ("keep", "factor", *kernel.constants)
    declared = [f"{c_type} {number}" for number in numbers]
    arguments = [
        # `restrict` lets the compiler vectorize: it promises that no two arrays overlap. So
        # `settled_beside` copies gradients that share memory with a variable.
        "ptrdiff_t n",
        f"const {c_type} *restrict gradient_in",
        *(f"{c_type} *restrict {name}_out" for name in names),
        *declared,
    ]
    lists = [
        "ptrdiff_t count",
        "const ptrdiff_t *sizes",
        f"{c_type} *const *gradients",
        f"{c_type} *const *arrays",
        *declared,
    ]
    passed = ["sizes[i]", "gradients[i]", *(f"arrays[{j}]" for j in range(len(names))), *numbers]
    lines = [
        f"CLONES static void {name}_one({', '.join(arguments)}) {{",
        "    for (ptrdiff_t i = 0; i < n; ++i) {",
        f"        const {c_type} gradient = gradient_in[i] * factor;",
        f"        {c_type} weight = weight_out[i] * keep;",
        *(f"        {c_type} {name} = {name}_out[i];" for name in kernel.slots),
        f"        {kernel.body}",
        *(f"        {name}_out[i] = {name};" for name in names),
        "    }",
        "}",
        f"void {name}({', '.join(lists)}) {{",
        f"    for (ptrdiff_t i = 0; i < count; ++i, arrays += {len(names)})",
        f"        {name}_one({', '.join(passed)});",
        "}",
    ]
    return "\n".join(lines)
