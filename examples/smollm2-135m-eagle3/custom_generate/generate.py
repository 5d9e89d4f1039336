"""Plain transformers with this head: model.generate(..., custom_generate=HEAD,
trust_remote_code=True).

The package headstart does the work.
"""

from headstart.inference import generate_from

HEAD = "examples/smollm2-135m-eagle3"
"""The repository or folder of this head: transformers runs a copy of this file and does not tell
where it came from."""


def generate(model, **arguments):
    """Called by `model.generate` with its own arguments."""
    return generate_from(HEAD, model, **arguments)
