"""Watch: says of any Python MPI program that can never go on which rank hangs, and where.

`startup/` runs in the ranks, without this package. The modules here run in ``mpistrat watch``.
"""
