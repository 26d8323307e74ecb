"""Loses a host of a cluster under load, again and again, and checks every stream: `make host-losses`."""
