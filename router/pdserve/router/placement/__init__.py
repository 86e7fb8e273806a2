"""Placement: which prefill and decode worker serve a prompt, and why."""
