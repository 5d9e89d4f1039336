"""Features that a head trains on: the target's hidden states, online, cached or from a server."""
