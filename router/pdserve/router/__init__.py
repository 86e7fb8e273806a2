"""Placement, admission, attempts and both front ends: what clients talk to. Speaks gRPC to workers; imports no torch."""
