"""OpenAI's API: JSON becomes a sluice.v1 request, and what is generated becomes JSON or events."""
