"""Times of rounds on a GPU: shapes of large models with random weights, against transformers' own steps.

The acceptance is SYNTHETIC: the weights are random, so each round's accepted tokens are drawn at a rate that gives the
acceptance length published for EAGLE-3 (arXiv:2503.01840, table 1). Only the cost of rounds is measured.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from headstart.heads import DraftHead, build_head
from headstart.inference import DynamicShape, Stats, Target, TreeShape
from headstart.inference.drafters.base import DraftContext, Drafter, NoDraft, PrefillChunk
from headstart.inference.drafters.by_name import tree_drafter
from headstart.inference.drafters.head_drafter import HeadDrafter
from headstart.inference.logits import RandomSampler, Sampler
from headstart.inference.loop import Verification
from headstart.inference.tree import DraftTree
from headstart.inference.verify import VerifyResult, greedy
from headstart.scripts.measuring.bandwidth import now, weight_bytes
from headstart.scripts.measuring.gpu_training import head_options
from headstart.train.console import log

LLAMA_3: dict[str, Any] = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama-3.1-8b": lambda: LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, **LLAMA_3
    ),
    "qwen3-8b": lambda: Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
    ),
    "llama-3.3-70b": lambda: LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, **LLAMA_3
    ),
}
"""Published dimensions; the largest that fits the device's memory are measured."""
DEPTH, WIDTH = 7, 10
"""Depth and width of the trees, as in EAGLE-2."""
RATE = 0.93
"""Synthetic acceptance rate at every depth: 1 + sum of RATE^d over 7 depths is 6.3, near the published 6.13."""


def random_pair(shape: PretrainedConfig, device: torch.device) -> tuple[Target, DraftHead]:
    """A target with random weights, and an EAGLE-3 head for it, in bfloat16."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).eval().requires_grad_(False)
        target = Target(model)
        options = head_options(target) | {"depth": DEPTH, "start": "random"}
        head = build_head("eagle3", options, target.info).to(device, torch.bfloat16)
        head.initialize(target.modules, torch.ones(target.info.vocab_size, dtype=torch.int64))
    return target, head.eval().requires_grad_(False)


def drafter_for(head: DraftHead, nodes: int, target: Target) -> Drafter:
    """Drafter of trees of `nodes` nodes: none, a chain, or a dynamic tree."""
    if nodes == 1:
        return NoDraft()
    shape = TreeShape.chain(nodes - 1) if nodes <= DEPTH else DynamicShape(nodes, DEPTH, WIDTH)
    return tree_drafter(head, shape, target.modules)


@torch.inference_mode()
def rounds_of(
    target: Target,
    head: DraftHead,
    decide: Verification,
    batch: int,
    context: int,
    nodes: int,
    bandwidth: float,
    repeats: int,
) -> dict[str, Any]:
    """Milliseconds of a round's parts after `context` tokens; the content of the cache is arbitrary."""
    drafter = drafter_for(head, nodes, target)
    if target.compiled:
        drafter.compile()
    room = (repeats + 3) * (DEPTH + 1)
    roots_B = torch.zeros(batch, dtype=torch.int64, device=target.device)
    drafter.begin(DraftContext(batch, context + room + nodes, RandomSampler(None), None))
    cache = target.new_cache(batch)
    longest = context
    target.forward_tree(NoDraft().propose(roots_B), context + room, cache, drafter.feature_layers)  # allocates
    cache.lengths_B = torch.full_like(roots_B, context)
    if isinstance(drafter, HeadDrafter):
        width = len(drafter.feature_layers) * target.info.hidden_size
        features_B1F = torch.zeros(batch, 1, width, dtype=target.dtype, device=target.device)
        drafter.prefill(PrefillChunk(roots_B[:, None], roots_B[:, None], features_B1F, torch.ones_like(roots_B)))
        drafter.shared.state = dataclasses.replace(drafter.catch_up(), lengths_B=torch.full_like(roots_B, context))
    draw = RandomSampler(torch.Generator(target.device).manual_seed(0))
    parts: dict[str, list[float]] = {"draft": [], "target": [], "rest": []}
    emitted = []
    for turn in range(repeats + 3):  # the first ones compile
        marks = [now(target.device)]
        tree = drafter.propose(roots_B)
        marks.append(now(target.device))
        output = target.forward_tree(tree, longest, cache, drafter.feature_layers)
        marks.append(now(target.device))
        finished = decide.verify_and_commit(tree, output, output.logits_BNV, draw, cache, Stats())
        marks.append(now(target.device))
        drafter.observe(finished)
        marks.append(now(target.device))
        longest += tree.max_depth + 1
        if turn >= 3:
            parts["draft"].append(marks[1] - marks[0] + marks[4] - marks[3])
            parts["target"].append(marks[2] - marks[1])
            parts["rest"].append(marks[3] - marks[2])
            emitted.append(float(finished.lengths_B.float().mean()))
    middle = {part: 1000 * statistics.median(seconds) for part, seconds in parts.items()}
    read = weight_bytes(target) + target.cache_bytes(batch, context)
    return {
        "batch": batch,
        "context": context,
        "nodes": nodes,
        "milliseconds": middle,
        "round": sum(middle.values()),
        "bandwidth_share": read / (middle["target"] / 1000) / bandwidth,
        "synthetic_tokens": statistics.mean(emitted),
        "synthetic_tokens_per_second": 1000 * batch * statistics.mean(emitted) / sum(middle.values()),
    }


def synthetic(tree: DraftTree, scores_BNV: Tensor, draw: Sampler) -> VerifyResult:
    """Accept each depth with probability `RATE`, whatever the logits: a path of random length down the tree."""
    passed_BD = draw.accept(scores_BNV.new_full((len(scores_BNV), tree.max_depth), RATE))
    lengths_B = 1 + passed_BD.long().cumprod(-1).sum(-1)
    places_A = torch.arange(tree.max_depth + 1, device=lengths_B.device)
    path_BA = places_A.expand(len(lengths_B), -1)  # any nodes: costs do not depend on them
    result = greedy(tree, scores_BNV, draw)  # so that the cost of a rule is included
    return VerifyResult(path_BA, lengths_B, result.next_tokens_B)


def stock(target: Target, batch: int, repeats: int, name: str) -> list[dict[str, Any]]:
    """Milliseconds of a step of transformers' own `generate`: eager, and with its compiled static cache."""
    ids = torch.zeros(batch, 512, dtype=torch.int64, device=target.device)
    found = []
    for what, more in (("eager", {}), ("static cache, compiled", {"cache_implementation": "static"})):
        settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, **more}
        tokens = 2 + repeats

        def seconds(count: int, settings: dict[str, Any] = settings) -> float:
            start = now(target.device)
            target.model.generate(ids, max_new_tokens=count, min_new_tokens=count, **settings)
            return now(target.device) - start

        seconds(tokens)  # warm, and compiled
        step = 1000 * (seconds(tokens) - seconds(2)) / (tokens - 2)
        found.append({"transformers": what, "batch": batch, "context": 512, "step": step})
        log.info(f"{name}, batch {batch}: transformers, {what}: {step:.2f} ms a step")
    return found
