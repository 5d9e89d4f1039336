"""Draft heads for a frozen language model: `heads` draft, `inference` decodes, `train` trains."""

import importlib.metadata

from packaging.requirements import Requirement

__version__ = importlib.metadata.version("headstart")


def check_versions() -> None:
    """Refuse a torch or a transformers outside of the range that the package's metadata states.

    Raises:
        ImportError: naming the range, what is installed, and the command that mends it.
    """
    for text in importlib.metadata.requires("headstart") or ():
        needed = Requirement(text)
        if needed.name not in ("torch", "transformers") or needed.marker is not None:
            continue
        installed = importlib.metadata.version(needed.name)
        if not needed.specifier.contains(installed, prereleases=True):
            raise ImportError(
                f"headstart {__version__} needs {needed.name} {needed.specifier}, and {installed}"
                f" is installed; pip install '{needed.name}{needed.specifier}'"
            )


check_versions()
