"""Peak memory of one EAGLE-3 training step, ours against the same step written naively.

    python benchmarks/memory.py
    python benchmarks/memory.py --vocabulary 8192 --lengths 512 1024 2048 4096 8192

Float32, D = 576, a draft vocabulary of all 128,256 tokens, 7 training-time-test steps, 1,024 tokens, random weights.
With `--lengths`, ours alone at each of these lengths, with activations kept and with activations recomputed. What is
counted is the peak of all tensors alive at once, minus parameters, gradients and optimizer state.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from headstart.heads import TargetFeatures, TargetInfo, TargetModules
from headstart.heads.checkpoints.save_load import build_head
from headstart.heads.eagle3 import Eagle3Head
from headstart.heads.layers.decoder_layer import TrainingTimeTest
from headstart.train.provenance import hardware

WIDTH, VOCABULARY, STEPS, TOKENS = 576, 128_256, 7, 1024


def main() -> None:
    """Print both peaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of a sequence; instead of the comparison")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.lengths:
        by_length(args.vocabulary, args.lengths)
        return
    head, features = random_step(args.vocabulary, args.tokens)
    ours, naive = (peak(head, lambda step=step: step(head, features)) for step in (our_loss, naive_loss))
    print(f"{hardware()}, torch {torch.__version__}, V {args.vocabulary:,}, {args.tokens:,} tokens, {STEPS} steps")
    print(f"ours {ours / 2**20:,.0f} MiB, naive {naive / 2**20:,.0f} MiB, ratio {ours / naive:.3f}")


def by_length(vocabulary: int, lengths: list[int]) -> None:
    """Print how the peak grows."""
    print(f"{hardware()}, torch {torch.__version__}, V {vocabulary:,}, {STEPS} steps\n")
    print("| tokens | MiB | KiB a token | recomputed, MiB | KiB a token |\n|---|---|---|---|---|")
    for tokens in lengths:
        row = []
        for recompute in (False, True):
            head, features = random_step(vocabulary, tokens)
            head.recompute = recompute
            found = peak(head, lambda head=head, features=features: our_loss(head, features))
            row += [f"{found / 2**20:,.0f}", f"{found / 2**10 / tokens:,.0f}"]
        print(f"| {tokens:,} | " + " | ".join(row) + " |", flush=True)


def random_step(vocabulary: int, tokens: int) -> tuple[Eagle3Head, TargetFeatures]:
    """A head of SmolLM2's dimensions with another vocabulary, and one sequence of random features."""
    target = TargetInfo(
        name="random",
        hidden_size=WIDTH,
        vocab_size=vocabulary,
        num_layers=30,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        max_positions=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    embed = torch.nn.Embedding(vocabulary, WIDTH).requires_grad_(False)
    lm_head = torch.nn.Linear(WIDTH, vocabulary, bias=False).requires_grad_(False)
    head = build_head("eagle3", {"depth": STEPS}, target)
    assert isinstance(head, Eagle3Head)
    features = TargetFeatures(
        features_BTF=torch.randn(1, tokens, 3 * WIDTH),
        last_BTD=torch.randn(1, tokens, WIDTH),
        tokens_BT=torch.randint(0, vocabulary, (1, tokens)),
        loss_mask_BT=torch.ones(1, tokens, dtype=torch.bool),
        modules=TargetModules(embed, lm_head, torch.nn.Identity(), ()),
    )
    return head, features


def our_loss(head: Eagle3Head, features: TargetFeatures) -> Tensor:
    """What training runs."""
    return head(features).loss


def naive_loss(head: Eagle3Head, features: TargetFeatures) -> Tensor:
    """The same number from whole [tokens, vocabulary] tensors, one after the other as the paper writes it."""
    loss = torch.zeros(())
    time = features.tokens_BT.shape[1]
    for step, state_BTD in enumerate(head.drafts(features, TrainingTimeTest(1), STEPS)):
        length = time - 2 - step  # the anchors whose drafts, up to this depth, lie in the text
        target_TV = features.modules.lm_head(features.last_BTD[0, 1 + step : 1 + step + length]).softmax(-1)
        draft_TV = head.lm_head(head.norm(state_BTD[0, :length])).log_softmax(-1)
        loss = loss - 0.8**step * (target_TV * draft_TV).sum()
    return loss


def peak(head: Eagle3Head, loss: Callable[[], Tensor]) -> int:
    """The peak of an optimizer's step; see `peak_of`."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-5)

    def step() -> None:
        value = loss()
        value.backward()
        optimizer.step()

    return peak_of(step, optimizer)


def peak_of(step: Callable[[], None], optimizer: torch.optim.Optimizer) -> int:
    """Bytes of tensors alive at once in the second of two steps, beyond those that were there before it."""
    step()  # now gradients and optimizer state exist
    optimizer.zero_grad(set_to_none=False)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step()
    changes = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = most = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


if __name__ == "__main__":
    main()
