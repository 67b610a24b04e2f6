"""Collectives on arrays, nests and tensors."""
