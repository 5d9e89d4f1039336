"""Plain transformers with this head: model.generate(..., custom_generate=HEAD, trust_remote_code=True).

HEAD is this repository or folder; the package headstart does the work.
"""

import inspect

from headstart.inference import generate_from


def generate(model, **arguments):
    """Called by `model.generate` with its own arguments."""
    # transformers runs a copy of this file and does not say where it came from: only its caller knows.
    head = inspect.currentframe().f_back.f_locals["custom_generate"]
    return generate_from(head, model, **arguments)
