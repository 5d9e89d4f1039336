"""Layers that several heads share, and the keys and values that they attend to while training and drafting."""
