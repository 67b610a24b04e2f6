"""Transformations: each file is named after the method of `Dataset` that it implements.

`pad.py` has padded and ragged batches, `take.py` also skip and shard, and `sample.py` also mixtures
of datasets. `zip.py` also enumerates elements, and `batch.py` also enumerates batches.
"""
