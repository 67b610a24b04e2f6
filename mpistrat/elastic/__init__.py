"""Elastic strategies: jobs that lose ranks and repeat the call in which that happened."""
