"""LoRA beside linear layers: slots of adapters, and what computes their products."""
