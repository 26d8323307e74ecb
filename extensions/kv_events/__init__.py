"""Publishes the prefix cache's changes in vLLM's form, for routers that keep an index of all caches."""
