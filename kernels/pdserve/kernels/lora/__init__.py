"""LoRA for linear layers: slots of adapters, and the code that computes their products."""
