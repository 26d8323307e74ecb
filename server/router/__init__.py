"""The router: sends requests to replicas of the server. `python -m server.router` runs it."""
