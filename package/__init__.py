"""Draft heads for a frozen language model: `heads` guess, `inference` decodes with them, `train` trains them."""

from importlib.metadata import version

__version__ = version("headstart")
