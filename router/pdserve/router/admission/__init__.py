"""Admission: which request may run next, by tenant and capacity."""
