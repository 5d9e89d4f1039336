"""The decoding loop: prompts, speculation rounds, the rows of a batch, and what watches them."""
