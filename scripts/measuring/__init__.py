"""Measurements that commands and benchmarks share: speed, acceptance, costs of a round, memory bandwidth."""
