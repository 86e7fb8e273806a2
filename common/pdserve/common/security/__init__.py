"""Keys, proofs between services, certificates and roles."""
