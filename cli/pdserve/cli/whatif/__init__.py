"""`pdserve whatif`: a fleet next to a changed one, on the same trace."""
