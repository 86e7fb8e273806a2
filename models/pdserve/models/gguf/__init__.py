"""GGUF: a file's metadata as the files of a model folder, and its tensors under the names of such a folder."""
