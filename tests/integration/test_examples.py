"""What the repository carries for the first commands: prompts and configs that work."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from pathlib import Path

import helpers
import pytest
import yaml

from headstart.addons.serve.comparison import METHODS
from headstart.addons.serve.options import ServedTrainConfig
from headstart.heads import build_head
from headstart.heads.checkpoints.model_card import model_card
from headstart.heads.checkpoints.save_load import GENERATE_FILE, generate_source
from headstart.scripts.command_line import options

ROOT = Path(__file__).parents[2]
PROMPTS = ROOT / "examples" / "prompts.jsonl"
CARDS = sorted((ROOT / "examples").glob("*/README.md"))


def test_the_example_prompts_cover_the_categories() -> None:
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert all(row.keys() == {"question_id", "category", "turns"} for row in rows)
    assert all(
        row["turns"] and all(isinstance(turn, str) and turn.strip() for turn in row["turns"])
        for row in rows
    )
    for values in ([row["question_id"] for row in rows], [row["turns"][0] for row in rows]):
        assert len(set(values)) == len(rows)
    counts = Counter(row["category"] for row in rows)
    assert set(counts) == {"chat", "math", "code", "summary", "translation"}
    assert min(counts.values()) >= 2


def test_the_example_head_is_a_decoding_method_as_every_head_is() -> None:
    head = "examples/smollm2-135m-eagle3"
    assert (ROOT / head / GENERATE_FILE).read_text(encoding="utf-8") == generate_source(head)


def test_every_card_is_what_its_checkpoint_says(tmp_path: Path) -> None:
    assert CARDS
    for card in CARDS:
        section = json.loads((card.parent / "config.json").read_text(encoding="utf-8"))["headstart"]
        assert card.read_text(encoding="utf-8") == model_card(section)


@pytest.mark.parametrize("card", CARDS, ids=lambda path: path.parent.name)
def test_the_recipe_of_every_card_gives_a_run(card: Path, tmp_path: Path) -> None:
    (recipe,) = re.findall(r"```yaml\n(.*?)```", card.read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe, encoding="utf-8")
    config = options(ServedTrainConfig, "train", "", ["--config", str(path)])
    written = yaml.safe_load(recipe)
    assert config.head == written["head"] and config.optim.lr == written["optim"]["lr"]


SERVING = ROOT / "examples" / "serving"


def test_the_compose_file_starts_vllm_with_a_head_as_its_card_does() -> None:
    text = (SERVING / "compose.yaml").read_text(encoding="utf-8")
    given = {"MODEL": "org/model", "HEAD": "me/head"}
    filled = re.sub(r"\$\{(\w+):[-?]([^}]*)\}", lambda name: given.get(name[1], name[2]), text)
    command = yaml.safe_load(filled)["services"]["vllm"]["command"]
    options = dict(word.removeprefix("--").split("=", 1) for word in command)
    assert options["model"] == "org/model"
    assert json.loads(options["speculative-config"]) == {
        "method": "eagle3",
        "model": "me/head",
        "num_speculative_tokens": 3,
    }


def test_the_python_example_knows_what_every_head_that_vllm_reads_is_called() -> None:
    spec = importlib.util.spec_from_file_location("vllm_offline", SERVING / "vllm_offline.py")
    assert spec and spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    own = {
        build_head(kind, {}, helpers.INFO).server_config()["architectures"][0]: kind
        for kind in METHODS
    }
    assert own == example.METHODS
