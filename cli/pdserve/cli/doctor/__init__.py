"""`pdserve doctor`: its checks, and how they are run and shown."""
