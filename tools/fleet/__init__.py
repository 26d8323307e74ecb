"""Shared by checks of several servers at once: streams with known outputs under a changing load."""
