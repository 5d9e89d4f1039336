"""What learns: conversations, features, the training loop, evaluation."""
