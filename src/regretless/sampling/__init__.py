"""Responses to prompts, with the token log-probabilities of the model that generated them."""
