"""The target's cache: keys and values of committed tokens and a tree, and layers with states."""
