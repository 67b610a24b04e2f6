"""What a job takes from its machine: files, sockets, threads and memory, counted and not timed.

    python -m benchmarks.machine --ranks 1 8 32 128 --output machine.json
"""
