"""Moving KV blocks between workers: connectors (data plane), transfers and leases (control plane). Knows no scheduler."""
