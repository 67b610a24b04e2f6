"""Sources of datasets: arrays in memory, generators, and objects of users."""
