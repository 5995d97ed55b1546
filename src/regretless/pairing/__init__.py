"""Preference pairs from verdicts and scores, and masked pairs from chosen responses."""
