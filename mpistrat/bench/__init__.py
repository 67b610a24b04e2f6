"""Benchmarks: this package and its peer, side by side in one run."""
