"""From logits to tokens: processors, kept sets, noise, log probabilities."""
