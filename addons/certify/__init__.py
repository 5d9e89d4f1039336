"""Certificates: whether an engine that decodes this target is lossless, judged by the target's own scores."""
