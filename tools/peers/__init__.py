"""Compares Sluice with its peers on one CPU: the same weights and requests, tokens before speeds."""
