"""Sluice and its peers on one CPU: the same weights and requests, tokens compared before speeds."""
