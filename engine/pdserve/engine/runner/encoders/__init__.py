"""Encoders in the model runner: of images, and of prompts for a decoder."""
