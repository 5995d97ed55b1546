"""Rows that stages exchange, readers of external formats, text to tokens and back."""
