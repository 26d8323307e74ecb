"""OpenAI's API: turns JSON into sluice.v1 requests, and generations into JSON or events."""
