"""Forms of requests and outputs on the wire; received values are validated here."""
