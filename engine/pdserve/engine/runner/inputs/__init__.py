"""Input of a step: the running sequences as arrays, and the rows that one step reads."""
