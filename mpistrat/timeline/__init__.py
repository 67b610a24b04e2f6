"""Where the time of a job went: one trace for all ranks, on one clock."""
