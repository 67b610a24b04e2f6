"""Agreement of ranks before each collective."""
