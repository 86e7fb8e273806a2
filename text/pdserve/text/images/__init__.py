"""Images of prompts: pixels and placeholders. No torch."""
