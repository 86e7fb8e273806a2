"""The device of a runner: events, memory, staged copies and captured graphs."""
