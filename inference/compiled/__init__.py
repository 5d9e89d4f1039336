"""Our CPU kernels and torch.compile, imported only when something is compiled."""
