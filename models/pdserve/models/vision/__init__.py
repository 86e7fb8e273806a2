"""Vision encoders, which run through transformers' modules."""
