"""Settings of services: files, environment, flags, and their checks."""
