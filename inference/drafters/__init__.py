"""Drafters propose draft trees: heads, a second model, lookup, n-grams, or an adaptive choice."""
