"""This head in plain transformers; the package headstart does the work.

model.generate(..., custom_generate=HEAD, trust_remote_code=True)
"""

from headstart.inference import generate_from

HEAD = "examples/smollm2-135m-eagle3"
"""The repository or folder of this head: transformers runs a copy of this file elsewhere."""


def generate(model, **arguments):
    """Called by `model.generate` with its own arguments."""
    return generate_from(HEAD, model, **arguments)
