"""gRPC and HTTP servers, channels and connections."""
