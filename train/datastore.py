"""A corpus for retrieval and n-gram models, out of texts or conversations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..heads.checkpoints.save_load import new_folder
from ..inference import load_tokenizer
from ..inference.drafters.ngram_index import Datastore
from ..inference.models.loading import tokenizer_origin
from .commands import DatastoreConfig
from .console import log
from .data.chat_template import check_tokenizer, read_conversations, render


def build_datastore(config: DatastoreConfig) -> Datastore:
    """Encode, sort, write; whole or not at all.

    Raises:
        ValueError: a source that cannot be read, or sources without a token.
    """
    tokenizer = load_tokenizer(config.target)
    texts = [ids for source in config.sources for ids in _texts(source, config.limit, tokenizer)]
    store = Datastore.of(texts, tokenizer_origin(tokenizer)["tokenizer"])
    with new_folder(Path(config.output)) as partial:
        store.save(partial)
    log.info(f"{config.output}: {sum(map(len, texts)):,} tokens of {len(texts):,} texts")
    return store


def _texts(source: str, limit: int | None, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Token ids of a file's text, or of each conversation as the target's chat template writes it."""
    if Path(source).is_file() and not source.endswith((".jsonl", ".json", ".parquet")):
        yield tokenizer(Path(source).read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
        return
    check_tokenizer(tokenizer, source)
    for row in read_conversations(source, limit):
        yield tokenizer(render(tokenizer, row["messages"]), add_special_tokens=False)["input_ids"]
