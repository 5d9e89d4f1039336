"""Layers that several heads share, and what their attention reads while training and while drafting."""
