"""Models that the code of `transformers` computes, with attention over our pages."""
