"""Further results of a step: pooled vectors, log-probabilities of prompts, the check for finite values."""
