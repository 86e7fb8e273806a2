"""API keys, tenants, their limits and usage, and the audit log."""
