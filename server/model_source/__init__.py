"""Resolves a model's name to a folder with its files: the Hugging Face hub, gs:// and s3:// buckets, or a folder."""
