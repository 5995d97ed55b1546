"""Statistics of preference data before training, and of tokens, scores and lengths after it."""
