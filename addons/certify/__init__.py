"""Certificates of losslessness: an engine's output, judged by its target's own scores."""
