"""Draft trees: shapes, acceptance rules, logits processors, random numbers, statistics."""
