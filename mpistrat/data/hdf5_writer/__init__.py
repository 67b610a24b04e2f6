"""HDF5 files that all ranks write: `HDF5Writer`, and the parts of the format that it needs."""
