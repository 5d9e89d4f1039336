"""Checkpoints of heads: saving and loading, the Hugging Face Hub, other projects' formats."""
