"""Encoders in the model runner: of images, and of prompts beside a decoder."""
