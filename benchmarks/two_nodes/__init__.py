"""Two nodes on one machine, joined by a link that is as slow as a network: real network stacks.

python -m benchmarks.two_nodes --per-node 2 -- -m mpistrat bench allreduce
python -m benchmarks.two_nodes -- -m benchmarks torch
"""
