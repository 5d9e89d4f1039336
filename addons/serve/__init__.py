"""Servers of the target: training data from their answers and states, and heads run in them."""
