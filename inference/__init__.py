"""What decodes: the frozen target, its cache, trees, verification and the loop."""

from .conversation import Chat, Conversation
from .decode import GenerateOutput, SpeculativeLM
from .hook import custom_generate, generate_from
from .rounds import Drafter, Passage, Round, Start
from .sources import load_tokenizer, tokenizer_origin
from .stats import Stats
from .target import Target
from .tree import DraftTree, DrawnShape, DynamicShape, TreePolicy, TreeShape, tree_policy, tree_word
from .verify import RULES

__all__ = [
    "RULES",
    "Chat",
    "Conversation",
    "DraftTree",
    "Drafter",
    "DrawnShape",
    "DynamicShape",
    "GenerateOutput",
    "Passage",
    "Round",
    "SpeculativeLM",
    "Start",
    "Stats",
    "Target",
    "TreePolicy",
    "TreeShape",
    "custom_generate",
    "generate_from",
    "load_tokenizer",
    "tokenizer_origin",
    "tree_policy",
    "tree_word",
]
