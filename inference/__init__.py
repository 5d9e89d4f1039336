"""Speculative decoding: the frozen target, its KV cache, draft trees, acceptance rules and the loop."""

from .custom_generate import custom_generate, generate_from, refresh
from .drafters.base import DraftContext, Drafter, PrefillChunk, StepResult
from .models.loading import load_tokenizer, tokenizer_provenance
from .sequences import Conversation
from .speculative_lm import Chat, GenerateOutput, SpeculativeLM
from .stats import Stats
from .target import Target
from .tracing import Trace
from .tracing.pieces import TextStream
from .tree import DraftTree
from .tuning.tree_spec import DynamicShape, SampledShape, TreePolicy, TreeShape, spec_of, tree_policy
from .verify import RULES

__all__ = [
    "RULES",
    "Chat",
    "Conversation",
    "DraftContext",
    "DraftTree",
    "Drafter",
    "DynamicShape",
    "GenerateOutput",
    "PrefillChunk",
    "SampledShape",
    "SpeculativeLM",
    "Stats",
    "StepResult",
    "Target",
    "TextStream",
    "Trace",
    "TreePolicy",
    "TreeShape",
    "custom_generate",
    "generate_from",
    "load_tokenizer",
    "refresh",
    "spec_of",
    "tokenizer_provenance",
    "tree_policy",
]
