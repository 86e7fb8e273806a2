"""Moving KV blocks between workers: connectors (data plane), transfers and leases (control plane). Imports no scheduler."""
