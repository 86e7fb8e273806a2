"""Placement: chooses the prefill and decode worker of a prompt, and records why."""
