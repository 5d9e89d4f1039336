"""Files that run in vLLM's environment and import nothing of headstart."""
