"""`pdserve doctor`: one file a check, and the way in which they are run and shown."""
