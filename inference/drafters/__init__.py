"""Drafters propose draft trees: heads, a second model, lookup, n-grams, and adaptive choice among them."""
