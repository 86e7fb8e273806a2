"""Models with an encoder, whose decoder attends to the encoder's output: BART's and T5's families."""
