"""A run: its recipe, its stages in order, its evaluation."""
