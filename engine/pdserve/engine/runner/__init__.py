"""Runs the model on one device: input batch, forward pass, outputs."""
