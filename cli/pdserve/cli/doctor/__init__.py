"""`pdserve doctor`: its checks, and the code that runs them and shows their findings."""
