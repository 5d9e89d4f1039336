"""Add-ons, a folder each: built on decoding and training, which never name them, and easy to lift out."""
