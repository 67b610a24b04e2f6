"""Transformations: each file is named after the method of `Dataset` that it implements."""
