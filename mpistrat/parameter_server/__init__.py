"""Parameter servers: variables that some ranks hold and others ask for by messages."""
