"""Commands that publish and convert heads."""
