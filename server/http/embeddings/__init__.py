"""Embeddings, and scores and rankings made of them, over prompts that need no decode."""
