"""Measurements of this machine, and the tree that is fastest by them."""
