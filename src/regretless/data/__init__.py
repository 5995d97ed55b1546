"""Rows that stages exchange, readers of foreign data, text to tokens and back."""
