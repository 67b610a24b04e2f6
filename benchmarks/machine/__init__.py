"""What a job takes from its machine: files, sockets, threads and memory, counted and not timed.

python -m benchmarks.machine --ranks 1 8 32 128 --output machine.json
"""

STAGES = {
    "plain": "NumPy and mpi4py alone",
    "imported": "and `import mpistrat`",
    "strategy": "and `MPIStrategy()`, one `reduce`",
    "step": "and one training step from HDF5",
    "checkpoint": "and a save and a restore",
    "torch": "PyTorch, NumPy and mpi4py alone",
    "torch_mpistrat": "and `mst.init()`, one `all_reduce`",
    "torch_gloo": "or gloo in place of it",
}
"""What the ranks do, by the name of the function in rank.py."""
