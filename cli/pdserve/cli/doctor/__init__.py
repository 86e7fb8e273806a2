"""`pdserve doctor`: one file per check, and the code that runs checks and shows their findings."""
