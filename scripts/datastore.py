"""Index a corpus: `headstart datastore --target MODEL --sources FILE.jsonl --output FOLDER`.

Its texts as tokens of the target: `--drafter retrieval:FOLDER` of the other commands then drafts
what followed the newest tokens there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headstart.console import log
from headstart.options import CommandOptions
from headstart.scripts.command_line import options


@dataclass(frozen=True)
class DatastoreConfig(CommandOptions):
    """A corpus, as tokens of the model that it helps to draft for."""

    required = ("target", "sources", "output")
    most_used = ("target", "sources", "output")

    target: str = ""
    """The model whose tokens are stored: a folder, a Hub id, a GGUF file, or package:NAME."""
    sources: list[str] = field(default_factory=list)
    """Text files, or conversations in any form that training reads."""
    output: str = ""
    """Folder to write."""
    limit: int | None = None
    """Read only the first conversations of each source; null for all."""


def main(arguments: list[str]) -> None:
    """Run `headstart datastore` with these command-line arguments."""
    build_datastore(options(DatastoreConfig, "datastore", __doc__, arguments))


def build_datastore(config: DatastoreConfig) -> None:
    """Encode and write the corpus, whole or not at all."""
    from headstart.heads.checkpoints.files import Contents, new_folder, refuse_foreign
    from headstart.inference import load_tokenizer
    from headstart.inference.drafters.datastore import FILES, MANIFEST_FILE, write_datastore
    from headstart.inference.targets.loading import tokenizer_provenance
    from headstart.inference.text.chat_template import check_tokenizer, render
    from headstart.inference.text.prompt_files import without_compression
    from headstart.train.data.conversations import FILES as ROWS
    from headstart.train.data.conversations import read_conversations

    contents = Contents("a datastore", FILES, lambda folder: (folder / MANIFEST_FILE).is_file())
    refuse_foreign(config.output, contents)
    tokenizer = load_tokenizer(config.target)

    def tokens_of(text: str) -> list[int]:
        tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    texts: list[list[int]] = []
    for source in config.sources:
        # A text file is one text; any other source has rows.
        if Path(source).is_file() and not without_compression(source).endswith(ROWS):
            try:
                texts.append(tokens_of(Path(source).read_text(encoding="utf-8")))
            except UnicodeDecodeError as error:
                raise ValueError(f"{source} is not a text in UTF-8: {error}") from error
            continue
        for row in read_conversations(source, config.limit):
            # Rows of tokens are taken unchanged, others are rendered by the chat template.
            if row.get("input_ids") is None:
                check_tokenizer(tokenizer, source)
            tokens = row.get("input_ids")
            if not tokens:
                tokens = tokens_of(render(tokenizer, row["messages"], tools=row.get("tools")))
            texts.append(tokens)
    name = tokenizer_provenance(tokenizer)["tokenizer"]
    with new_folder(config.output, contents) as partial:
        write_datastore(partial, texts, name)
    log.info(f"{config.output}: {sum(map(len, texts)):,} tokens of {len(texts):,} texts")
