"""OpenAI's /v1/files and /v1/batches: a durable queue on disk, below interactive requests."""
