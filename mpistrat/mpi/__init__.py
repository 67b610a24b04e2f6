"""MPI: the world, its communicators, and the launcher of this process."""
