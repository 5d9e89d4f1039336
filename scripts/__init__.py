"""The command line: one file a command, with its options and its work."""
