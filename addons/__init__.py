"""What is built on decoding and training: each folder is an add-on, which could be lifted out. The core names none."""
