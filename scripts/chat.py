"""Chat in the terminal: `headstart chat --target MODEL --head HEAD`.

Answers stream as they are accepted; each is followed by its speed and acceptance. /help lists the
commands. Ctrl-C ends an answer, Ctrl-D the chat. Without a terminal, messages are the lines of
standard input.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headstart.console import console, log
from headstart.options import limited, template_variables
from headstart.scripts.command_line import SamplingOptions, options, recorded

if TYPE_CHECKING:
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

    from headstart.addons.monitor import Monitor
    from headstart.inference import Chat, SpeculativeLM, Stats

HELP = """\
/drafts         show the last answer: accepted drafts in green, tokens of the target plain
/plain          answer without drafts, or with them again
/system TEXT    begin again with a system prompt; without TEXT, with none
/reset          begin again
/help           this list
/exit           leave, as Ctrl-D does"""


@dataclass(frozen=True)
class ChatConfig(SamplingOptions):
    """A conversation on screen."""

    required = ("target",)
    most_used = ("target", "head", "max_new_tokens", "temperature", "record")
    texts = ("system",)

    max_new_tokens: int = limited(512, minimum=1)
    """Longest answer, in tokens."""
    system: str | None = None
    """The system prompt; null for none."""
    metrics_port: int | None = None
    """Serve Prometheus metrics at http://127.0.0.1:PORT/metrics; 0 for a free port, null for
    none."""
    record: str | None = None
    """Folder in which to record the answers with the target's states, for training; null for none.
    It holds the texts, as tokens. HEADSTART_NO_RECORD=1 in the environment wins over it."""


def main(arguments: list[str]) -> None:
    """Run `headstart chat` with these command-line arguments."""
    chat_on_screen(options(ChatConfig, "chat", __doc__, arguments))


def chat_on_screen(config: ChatConfig) -> None:
    """Answer messages until the input ends."""
    import torch

    if sys.stdin.isatty():
        # Arrow keys and a history for `input`.
        with contextlib.suppress(ImportError):
            import readline

            # Several lines that are pasted are one message.
            readline.parse_and_bind("set enable-bracketed-paste on")
    # Metrics are served before the model is loaded: the port may be taken.
    monitor = None
    if config.metrics_port is not None:
        from headstart.addons.monitor import Monitor

        monitor = Monitor(model=config.target, head=config.head or "", drafter=config.drafter or "")
        log.info(f"metrics: http://127.0.0.1:{monitor.serve(config.metrics_port)}/metrics")
    lm, tokenizer = config.load()
    torch.manual_seed(config.seed)
    session = Session(config, lm, tokenizer, monitor)
    log.info("warming up")
    lm.warmup()
    log.info("/help lists the commands")
    with recorded(config.record, [session.lm, session.plain], tokenizer):
        converse(session)


def converse(session: Session) -> None:
    """Answer messages and obey commands until the input ends."""
    while True:
        try:
            # Not console.input, which prints the prompt by itself: readline would erase what it
            # does not know.
            message = input("> " if sys.stdin.isatty() else "").strip()
            if message == "/exit":
                return
            if message.startswith("/"):
                session.obey(message)
            else:
                session.answer(message)
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print()
        except ValueError as error:  # such as a text that has become too long
            log.error(str(error))


@dataclass
class Session:
    """A conversation, and the decoders that may continue it."""

    config: ChatConfig
    lm: SpeculativeLM
    tokenizer: PreTrainedTokenizerBase
    monitor: Monitor | None = None
    system: str | None = None
    chat: Chat = field(init=False)
    stats: list[Stats] = field(default_factory=list)
    """Statistics of the last answer; empty if it was interrupted."""

    def __post_init__(self) -> None:
        from headstart.inference import RoundObserver, SpeculativeLM

        # The list itself, which `begin` and `answer` clear.
        whole_answers = self.stats

        class KeepStats(RoundObserver):
            """Keeps the statistics of answers that were not interrupted."""

            def end(self, stats: Stats, error: BaseException | None) -> None:
                if error is None:
                    whole_answers.append(stats)

        # Two decoders of one target; /plain changes which of them answers.
        self.plain = SpeculativeLM(self.lm.target)
        self.decoder = self.lm
        self.lm.observers.append(KeepStats())
        self.plain.observers.append(KeepStats())
        if self.monitor is not None:
            self.lm.observers.append(self.monitor)
            self.plain.observers.append(self.monitor.labelled(model=self.config.target))
        self.begin(self.config.system)

    def begin(self, system: str | None) -> None:
        """Forget all messages."""
        from headstart.scripts.measuring.comparison import answer_settings

        config = self.config
        settings = answer_settings(
            config.max_new_tokens, config.temperature, config.top_k, config.top_p
        )
        template = template_variables(config.thinking, config.template_kwargs)
        self.system = system
        self.chat = self.decoder.chat(self.tokenizer, system, template=template, **settings)
        self.stats.clear()

    def obey(self, line: str) -> None:
        """Run a command."""
        command, _, text = line.partition(" ")
        if command == "/drafts":
            console.print(self.drafts())
        elif command == "/plain":
            drafts = self.decoder is self.plain
            self.decoder = self.lm if drafts else self.plain
            self.chat.lm = self.decoder
            log.info("with drafts again" if drafts else "plain decoding")
        elif command in ("/system", "/reset"):
            self.begin(self.system if command == "/reset" else text.strip() or None)
            log.info("a new conversation")
        else:
            if command != "/help":
                log.error(f"unknown command {command!r}")
            console.print(HELP, markup=False, highlight=False)

    def answer(self, message: str) -> None:
        """Stream the answer to a message.

        An interrupted answer stays in the conversation as far as it came.
        """
        if not message:
            return
        self.stats.clear()
        pieces = []
        start = time.perf_counter()
        try:
            with contextlib.closing(self.chat.stream(message)) as answer:
                for piece in answer:
                    pieces.append(piece)
                    console.print(piece, end="", markup=False, highlight=False, emoji=False)
        # A stream that is closed early leaves the conversation without this turn: add it.
        except KeyboardInterrupt:
            self.chat.messages += [
                {"role": "user", "content": message},
                {"role": "assistant", "content": "".join(pieces)},
            ]
            console.print(" [dim](stopped)[/]")
            return
        # Rounds' tokens and the prefill's one.
        seconds = time.perf_counter() - start
        (stats,) = self.stats
        line = (
            f"{(stats.tokens + 1) / seconds:.1f} tokens/s, acceptance length"
            f" {stats.acceptance_length:.2f}"
        )
        if stats.plain_rounds:
            line += f", {stats.plain_rounds} of {stats.rounds} rounds without drafts"
        last = self.chat.past.tokens[-1]
        if stats.tokens + 1 >= self.config.max_new_tokens and last not in self.lm.target.end_tokens:
            line += f", cut off at max_new_tokens = {self.config.max_new_tokens}"
        console.print(f"\n[dim]{line}[/]", highlight=False)

    def drafts(self) -> Text:
        """Return the last answer with its accepted drafts in green."""
        from rich.text import Text

        from headstart.inference.text.detokenizer import text_pieces

        if not self.stats:
            return Text("no finished answer yet")
        (stats,) = self.stats
        tokens = self.chat.past.tokens[-stats.tokens - 1 :]
        # The prefill's token comes first. Each round adds accepted drafts, then a bonus token.
        drafted = [False]
        for record in stats.rows[0]:
            accepted = min(record.accepted, record.returned)
            drafted += [True] * accepted + [False] * (record.returned - accepted)
        text = Text(overflow="fold")
        pieces = text_pieces(self.tokenizer, tokens, skip_special_tokens=True)
        for piece, green in zip(pieces, drafted, strict=True):
            text.append(piece, "green" if green else "")
        share = sum(drafted) / len(drafted)
        return text.append(
            f"\n{sum(drafted)} of {len(drafted)} tokens were drafted, {share:.0%}", "dim"
        )
