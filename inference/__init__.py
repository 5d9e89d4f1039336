"""Speculative decoding: frozen target, KV cache, draft trees, acceptance rules and the loop."""

from .custom_generate import custom_generate, generate_from, refresh
from .drafters.base import DraftContext, Drafter, PrefillChunk
from .drafters.round import Round, Verdict
from .drafters.specs import History, SmallerModel
from .engines.target import Target
from .output import GenerateDictOutput, GenerateOutput
from .rounds.observers import DecodingCall, RoundObserver
from .rounds.sequences import Conversation
from .speculative_lm import SpeculativeLM
from .targets.loading import load_tokenizer, tokenizer_provenance
from .text.chat import Chat
from .text.detokenizer import TextStream
from .trees.stats import Stats
from .trees.tree import DraftTree
from .trees.tree_spec import DynamicShape, SampledShape, TreePolicy, TreeShape, spec_of, tree_policy
from .trees.verify import RULES, AcceptanceRule

__all__ = [
    "RULES",
    "AcceptanceRule",
    "Chat",
    "Conversation",
    "DecodingCall",
    "DraftContext",
    "DraftTree",
    "Drafter",
    "DynamicShape",
    "GenerateDictOutput",
    "GenerateOutput",
    "History",
    "PrefillChunk",
    "Round",
    "RoundObserver",
    "SampledShape",
    "SmallerModel",
    "SpeculativeLM",
    "Stats",
    "Target",
    "TextStream",
    "TreePolicy",
    "TreeShape",
    "Verdict",
    "custom_generate",
    "generate_from",
    "load_tokenizer",
    "refresh",
    "spec_of",
    "tokenizer_provenance",
    "tree_policy",
]
