"""API keys, certificates, and the server's limits of memory and descriptors."""
