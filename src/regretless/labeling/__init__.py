"""Verdicts and scores of responses: verifiers that compare with the gold answer, and a judge."""
