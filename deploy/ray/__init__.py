"""Sluice as an application of Ray Serve. Sluice itself imports nothing from here, and never imports Ray."""
