"""MPI: the world, its communicators, and what launched this process."""
