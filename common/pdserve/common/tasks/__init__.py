"""Tasks of an event loop: those that live as long as a service, and the first of several that is done."""
