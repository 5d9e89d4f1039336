"""A conversation by a chat template; each answer reads only the new part of the text."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..engines.target import Target
from ..rounds.sequences import Conversation
from .chat_template import TEMPLATE_ERRORS, template_error
from .detokenizer import TextStream


class Decoder(Protocol):
    """A `SpeculativeLM`, as far as a conversation needs it."""

    target: Target

    def stream(self, inputs: Tensor, **options: Any) -> Iterator[list[int]]:
        """Yield the tokens of each round."""


class Chat:
    """A conversation by the tokenizer's chat template, whose answers read only the new text.

    chat = lm.chat(tokenizer, max_new_tokens=256)
    print(chat.say("What is speculative decoding?"))
    """

    def __init__(
        self,
        lm: Decoder,
        tokenizer: PreTrainedTokenizerBase,
        system: str | None = None,
        template: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """Begin a conversation; `SpeculativeLM.chat` does so.

        Args:
            lm: the `SpeculativeLM` that answers.
            tokenizer: the target's tokenizer.
            system: the system prompt.
            template: variables for the chat template, such as `{"enable_thinking": False}`.
            settings: options of `SpeculativeLM.generate` for every answer.

        Raises:
            ValueError: a tokenizer without a chat template.
        """
        if not tokenizer.chat_template:
            raise ValueError(
                f"{type(tokenizer).__name__} has no chat template; give generate the whole text"
                " instead"
            )
        self.lm = lm
        self.tokenizer = tokenizer
        self.template = template or {}
        self.settings = settings
        self.messages: list[dict[str, str]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self.past = Conversation()

    def say(self, text: str, **settings: Any) -> str:
        """The answer to a message, with `settings` for this call.

        A call that fails leaves `messages` unchanged.
        """
        return "".join(self.stream(text, **settings))

    def stream(self, text: str, **settings: Any) -> Generator[str]:
        """Yield the answer piece by piece.

        An answer that is not read to its end does not enter the conversation.

        Raises:
            ValueError: the chat template fails.
        """
        # 1. The whole conversation as token ids; `self.past` knows its beginning already.
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            prompt: Any = self.tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
                **self.template,
            )
        except TEMPLATE_ERRORS as error:
            raise template_error(self.tokenizer, error) from error
        # 2. Options: this call's before those of the conversation.
        answer = TextStream(self.tokenizer)
        options = {"tokenizer": self.tokenizer, **self.settings, **settings}
        if "generation_config" not in options:
            # A turn ends where the tokenizer says so, whether the model's config names it or not.
            ends = {*self.lm.target.end_tokens, self.tokenizer.eos_token_id} - {None}
            options.setdefault("eos_token_id", sorted(ends))
        # 3. The answer, round by round. `put` may hold back a part that can still change.
        input_ids = prompt["input_ids"].to(self.lm.target.device)
        for tokens in self.lm.stream(input_ids, past_key_values=self.past, **options):
            piece = answer.put(tokens)
            if piece:
                yield piece
        piece = answer.end()
        if piece:
            yield piece
        # 4. Only a whole answer enters the conversation.
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
