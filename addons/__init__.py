"""What is built on decoding and training and could be lifted out: each folder is one add-on, which the core never names."""
