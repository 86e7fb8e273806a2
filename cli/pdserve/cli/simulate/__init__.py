"""`pdserve simulate`: a trace on a fleet that exists only in virtual time."""
