"""LoRA adapters: their folders, and their places in a decoder."""
