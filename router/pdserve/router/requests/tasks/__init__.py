"""Tasks of a request: each serves one prompt, one beam search or one input, over as many attempts as it takes."""
