"""Types, hashing, settings, errors, wire conversion and time vocabulary shared by every service. Imports no torch."""
