"""gRPC: the services, what every call goes through, ports and their end."""
