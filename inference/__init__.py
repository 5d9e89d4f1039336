"""What decodes: the frozen target, its cache, trees, verification and the loop."""

from .decode import GenerateOutput, SpeculativeLM
from .stats import Stats
from .target import Target, load_tokenizer
from .tree import DraftTree, TreeShape

__all__ = ["DraftTree", "GenerateOutput", "SpeculativeLM", "Stats", "Target", "TreeShape", "load_tokenizer"]
