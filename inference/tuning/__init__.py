"""Which draft tree to use: tree specs, the search for a tree, the cost of a round."""
