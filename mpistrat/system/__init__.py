"""The operating system: files, processes, threads, processor cores."""
