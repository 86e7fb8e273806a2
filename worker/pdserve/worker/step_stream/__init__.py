"""One stream per router: its calls come up, the outputs of each engine step go down in one message."""
