"""Transformations: each file is named after the method of `Dataset` that it implements.

`pad.py` has padded and ragged batches, `take.py` also skip and shard, `sample.py` also mixtures of
datasets; `zip.py` enumerates elements, and `batch.py` batches.
"""
