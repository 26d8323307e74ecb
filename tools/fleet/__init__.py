"""Runs a fleet of servers on this machine, loses processes under load, and checks every stream: `make fleet`."""
