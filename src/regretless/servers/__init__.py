"""OpenAI-compatible servers: asked within limits, paid within a budget, every reply kept."""
