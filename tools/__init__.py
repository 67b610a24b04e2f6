"""Programs for work on mpistrat, beside the package and not installed with it."""
