"""One client request in the router, from its prepared prompts to its output stream."""
