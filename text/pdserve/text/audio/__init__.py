"""Sound of prompts: files, sampling rates, and the samples that a model's encoder reads."""
