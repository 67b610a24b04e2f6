"""The examples in the docstrings of both callbacks."""

import doctest
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import lightning.pytorch
import numpy as np
import torch
import transformers

import mpistrat
import mpistrat as ms
import mpistrat.lightning
import mpistrat.torch as mst
import mpistrat.transformers

transformers.logging.set_verbosity_error()
NAMES = {"lightning": lightning, "mpistrat": mpistrat, "ms": ms, "mst": mst, "np": np, "os": os}
NAMES |= {"torch": torch, "transformers": transformers}
for each in (mpistrat.lightning.HDF5Checkpoint, mpistrat.transformers.HDF5Checkpoint):
    for test in doctest.DocTestFinder(recurse=False).find(each, globs=dict(NAMES)):
        result = doctest.DocTestRunner().run(test)
        assert result.attempted > 5
        sys.exit(1) if result.failed else None
print("is done")
