"""Other projects' functions, by their names and arguments, computed by keraunos."""
