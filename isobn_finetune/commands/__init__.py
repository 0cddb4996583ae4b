"""The commands: each parses, resolves, calls one library function and prints."""
