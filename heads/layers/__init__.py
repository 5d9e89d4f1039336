"""Layers that heads share, and the keys and values that they read in training and drafting."""
