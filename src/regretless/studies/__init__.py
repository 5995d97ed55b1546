"""Studies: one recipe over models, methods, seeds and settings, and its tables and figures."""
