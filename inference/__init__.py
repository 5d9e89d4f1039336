"""Speculative decoding: the frozen target, its KV cache, draft trees, acceptance rules and the loop."""

from .chat import Chat
from .custom_generate import custom_generate, generate_from, refresh
from .detokenizer import TextStream
from .drafters.base import DraftContext, Drafter, PrefillChunk
from .drafters.specs import Lookahead, Ngram, PromptLookup, RandomTokens, Retrieval, SmallerModel
from .models.loading import load_tokenizer, tokenizer_provenance
from .observers import ObservedCall, RoundObserver
from .output import GenerateDictOutput, GenerateOutput
from .round import Round, Verdict
from .sequences import Conversation
from .speculative_lm import SpeculativeLM
from .stats import Stats
from .target import Target
from .tree import DraftTree
from .tuning.tree_spec import DynamicShape, SampledShape, TreePolicy, TreeShape, spec_of, tree_policy
from .verify import RULES, AcceptanceRule

__all__ = [
    "RULES",
    "AcceptanceRule",
    "Chat",
    "Conversation",
    "DraftContext",
    "DraftTree",
    "Drafter",
    "DynamicShape",
    "GenerateDictOutput",
    "GenerateOutput",
    "Lookahead",
    "Ngram",
    "ObservedCall",
    "PrefillChunk",
    "PromptLookup",
    "RandomTokens",
    "Retrieval",
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
