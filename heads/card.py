"""The model card of a head checkpoint, written from what was measured."""

from __future__ import annotations

import json
from typing import Any

_CARD = """---
library_name: headstart
base_model: {quoted}
tags: [speculative-decoding, {head}]
---

# A {head} draft head for {target}

Draft heads guess several tokens, one forward pass of the model checks them all. With greedy or exact verification
the output is the model's own: lossless.{adapted}

```python
from headstart.inference import SpeculativeLM

lm = SpeculativeLM.from_pretrained({quoted}, head="THIS FOLDER OR ITS HUB ID")
out = lm.generate(input_ids, max_new_tokens=256)
```

or with plain transformers, headstart being installed:

```python
model.generate(input_ids, max_new_tokens=256, custom_generate="THIS FOLDER OR ITS HUB ID", trust_remote_code=True)
```

## Measured

{measured}

Acceptance length: tokens emitted per round, the bonus token counted. Acceptance rate at depth d: how often the
accepted path reaches depth d, given that it reached d - 1.

## Head

{options}

## Trained against

{origin}
"""

_ADAPTED = """

It was trained together with a LoRA adapter of the model, which lies in `adapter/`. Decoding is lossless with respect to
the adapted model, not to the original: the adapter is merged when the model is loaded by name."""


def model_card(section: dict[str, Any]) -> str:
    """Markdown from the `headstart` section of a checkpoint's config.json."""
    options = "\n".join(f"- {name}: {value}" for name, value in section["options"].items())
    return _CARD.format(
        target=section["target"]["name"],
        quoted=json.dumps(section["target"]["name"]),
        head=section["head"],
        measured=_measured_table(section["measured"]),
        options=options,
        adapted=_ADAPTED if section["adapted"] else "",
        origin="\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in section["origin"].items()),
    )


def _figure(value: float | None) -> str:
    """Two digits, or a dash where nothing was measured."""
    return "-" if value is None else f"{value:.2f}"


def _measured_table(measured: dict[str, Any]) -> str:
    """One row per tree: {"chain": {"acceptance_length": ..., "interval": [low, high], "rates": [...], ...}}."""
    if "calibration" in measured:  # newer, and on prompts that somebody chose
        return _measured_table(measured["calibration"] | {"kind": "prompts"})
    trees = measured.get("trees")
    if not trees:
        return "Nothing was measured when this checkpoint was written."
    rows = [
        f"| {name} | {row['nodes']} | {_figure(row['acceptance_length'])} "
        f"({_figure(row['interval'][0])} to {_figure(row['interval'][1])}) | "
        + " ".join(map(_figure, row["acceptance_rate_by_depth"]))
        + " |"
        for name, row in trees.items()
    ]
    header = "| tree | nodes | acceptance length (95 % interval) | acceptance rate by depth |\n|---|---|---|---|\n"
    kind = measured.get("kind", "held-out prompts, greedy")
    told = f"{measured['prompts']} {kind}, {measured['new_tokens']} tokens each.\n\n"
    return told + header + "\n".join(rows)
