"""Text in and out: tokenizer, chat template, detokenizer, stop strings, `OutputProcessor`. Imports no torch."""
