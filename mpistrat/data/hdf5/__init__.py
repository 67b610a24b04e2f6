"""HDF5 files as sources of examples."""
