"""What is built on the core and could be lifted out: each folder is one add-on, which the core never names."""
