"""Preference training: a trained model or adapter from pairs."""
