"""HDF5 files that all ranks write: `HDF5Writer`, and the parts of the format that it needs.

`writer` checks a step on each rank, and the ranks agree on names, dtypes and shapes. They exchange
the lengths of their parts (`step_layout`), and send rows to the owners of the chunks (`exchange`,
`geometry`). Each owner encodes its chunks, and writes them behind what is used of the file
(`chunk_store`, `encoders`). Rank 0 then writes the right edge of each B-tree (`chunk_tree`) and a
copy of all headers that change, and commits with one write of 40 bytes in the superblock
(`root_file`, `superblock`).

h5py makes the headers once, in memory, at two addresses. The difference of the two images shows
where the pointers are, so a copy for any address takes a few additions (`header_image`,
`header_copy`).
"""
