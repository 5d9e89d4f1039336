"""The model card of a head checkpoint, written from what was measured."""

from __future__ import annotations

from typing import Any

_CARD = """---
library_name: headstart
base_model: {target}
tags: [speculative-decoding, {head}]
---

# A {head} draft head for {target}

Draft heads guess several tokens, one forward pass of the model checks them all. With greedy or exact verification
the output is the model's own: lossless.

```python
from headstart.inference import SpeculativeLM

lm = SpeculativeLM.from_pretrained("{target}", head="THIS FOLDER OR ITS HUB ID")
out = lm.generate(input_ids, max_new_tokens=256)
```

## Measured

{measured}

Acceptance length: tokens emitted per round, the bonus token counted. Acceptance rate at depth d: how often the
accepted path reaches depth d, given that it reached d - 1.

## Head

{options}
"""


def model_card(section: dict[str, Any]) -> str:
    """Markdown from the `headstart` section of a checkpoint's config.json."""
    options = "\n".join(f"- {name}: {value}" for name, value in section["options"].items())
    return _CARD.format(
        target=section["target"]["name"],
        head=section["head"],
        measured=_measured_table(section["measured"]),
        options=options,
    )


def _measured_table(measured: dict[str, Any]) -> str:
    """One row per tree: {"chain": {"acceptance_length": ..., "interval": [low, high], "rates": [...], ...}}."""
    trees = measured.get("trees")
    if not trees:
        return "Nothing was measured when this checkpoint was written."
    rows = [
        f"| {name} | {row['nodes']} | {row['acceptance_length']:.2f} "
        f"({row['interval'][0]:.2f} to {row['interval'][1]:.2f}) | "
        + " ".join(f"{rate:.2f}" for rate in row["acceptance_rate_by_depth"])
        + " |"
        for name, row in trees.items()
    ]
    header = "| tree | nodes | acceptance length (95 % interval) | acceptance rate by depth |\n|---|---|---|---|\n"
    return (
        f"{measured['prompts']} held-out prompts, greedy, {measured['new_tokens']} tokens each.\n\n"
        + header
        + "\n".join(rows)
    )
