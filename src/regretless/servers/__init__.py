"""OpenAI-compatible servers: requests within rate limits and a budget, every reply cached."""
