"""`pdserve chat`, `generate` and `bench`: their options, and a client over gRPC."""
