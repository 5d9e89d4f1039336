"""Drafters propose draft trees: heads, a second model, a history, or an adaptive choice."""
