"""Features that a head trains on: the target's hidden states, computed online, cached, or from a server."""
