"""Measurements for commands and benchmarks: speed, acceptance, round costs, memory bandwidth."""
