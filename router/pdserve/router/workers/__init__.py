"""Workers as the router knows them: discovery, watches, load, and cached blocks."""
