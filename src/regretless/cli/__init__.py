"""The command line: parsing, and what its verbs do."""
