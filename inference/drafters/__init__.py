"""What proposes draft trees: heads, a second model, lookup, n-grams, and the choice among them."""
