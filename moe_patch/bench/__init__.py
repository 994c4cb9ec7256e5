"""Times against Hugging Face's implementations, after parity holds: one kind a file, and `cli`."""
