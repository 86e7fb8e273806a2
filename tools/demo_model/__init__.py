"""Trains the bundled demo model from facts that lie in this folder.

``python -m demo_model --out FOLDER`` writes the text, learns the tokenizer, trains the network,
saves the checkpoint and checks it. Nothing is downloaded.
"""
