"""The gRPC side: services, the interceptor of every call, ports and the graceful stop."""
