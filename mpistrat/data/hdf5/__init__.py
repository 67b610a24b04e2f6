"""HDF5 as a source of examples."""
