"""Texts to tokens: the tokenizer with its folder, special tokens as plain text, long texts in parts."""
