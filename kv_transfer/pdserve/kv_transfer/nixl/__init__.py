"""The NIXL connector (UCX: RDMA, shared memory)."""
