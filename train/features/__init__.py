"""What a head trains on: the target's hidden states, online, cached or written by a server."""
