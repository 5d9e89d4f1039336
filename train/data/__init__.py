"""Conversations: reading, rendering, tokenizing, batching, and making them with a model."""
