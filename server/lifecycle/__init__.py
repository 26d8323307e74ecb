"""A server's life, in one process or several: start, watch, drain, end."""
