"""Weight files of a model folder, checked and read."""
