"""LoRA adapters of an engine: their content in main memory and on the device."""
