"""Trains the bundled image model on pictures that it draws itself.

``python -m demo_image_model --out FOLDER`` draws pictures, trains the network, saves the checkpoint and checks it. Nothing is
downloaded.
"""
