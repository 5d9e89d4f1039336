"""The target's cache: keys and values of committed tokens and of a tree after them, and layers that keep a state."""
