"""The service that clients call: both front ends, admission, placement and attempts. Calls workers by gRPC; imports no torch."""
