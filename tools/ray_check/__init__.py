"""Checks the Ray Serve application with real Ray on this machine: `make ray`."""
