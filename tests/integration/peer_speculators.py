"""Run in an environment of its own (`make peers`), where the package `speculators` is.

    python peer_speculators.py load FOLDER OUT    its model of our export
    python peer_speculators.py save FOLDER OUT    a model of its own with random weights, saved

Both write draft logits on random features; see test_peers.py.
"""

from __future__ import annotations

import sys

import torch
from speculators import SpeculatorModel, SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dspark import DSparkDraftModel
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

LENGTH = 16


def own_model() -> Eagle3DraftModel:
    """A model with a truncated vocabulary, its norms away from 1."""
    layer = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        vocab_size=40,
        num_hidden_layers=1,
        rms_norm_eps=1e-5,
        attn_implementation="eager",
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=7,
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=[2, 5, 9],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    model = Eagle3DraftModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    ids = torch.arange(7) * 5 + 1
    model.d2t.copy_(ids - torch.arange(7))
    model.t2d.copy_(torch.zeros(40, dtype=torch.bool).index_fill(0, ids, True))
    return model


def dflash(model: DFlashDraftModel, out: str) -> None:
    """Draft logits [anchors, block, V] and the training loss, behind every anchor with a whole
    block after it."""
    features = torch.randn(1, LENGTH, model.fc.in_features)
    last = torch.randn(1, LENGTH, model.norm.weight.numel())
    # Where the true token cannot be drafted, headstart has no loss.
    tokens = torch.arange(40) if model.t2d is None else model.t2d.nonzero()[:, 0]
    tokens = tokens[torch.randint(len(tokens), (1, LENGTH))]
    mask = torch.ones(1, LENGTH)
    mask[:, 0] = 0  # an anchor without context
    anchors = LENGTH - model.block_size - 1
    given = (features, tokens, mask, last, torch.zeros(1, LENGTH, dtype=torch.long))
    with torch.no_grad():
        hidden, logits, _, _, places = model._backbone_forward(*given, max_anchors=anchors)
        if isinstance(model, DSparkDraftModel):  # the true tokens before each draft
            before = tokens[0, places].view(anchors, -1)
            if not model.config.sample_from_anchor:
                before = torch.cat([before[:, :1], before[:, :-1]], dim=1)
            states = hidden.view(*before.shape, -1)
            bias = model.markov_head.block_bias(prev_token_ids=before, hidden_states=states)
            logits = logits + bias.view_as(logits)
        eager = {"loss_config": resolve_loss_config("kl_div", "eager")}
        if isinstance(model, DSparkDraftModel):
            eager["tv_loss_fn"] = resolve_loss_config("tv", "eager")["tv"][0]
        loss = model(*given, max_anchors=anchors, **eager)[1]
    logits = logits.unflatten(1, (anchors, -1))[0]
    torch.save(
        {"features": features, "last": last, "tokens": tokens, "logits": logits, "loss": loss}, out
    )


def main(what: str, folder: str, out: str) -> None:
    """Write features, tokens and logits for the other side to compare."""
    torch.manual_seed(0)
    if what == "save":
        model = own_model()
        model.save_pretrained(folder)
    else:
        model = SpeculatorModel.from_pretrained(folder, attn_implementation="eager")
    model = model.eval().float()
    if isinstance(model, DFlashDraftModel):
        dflash(model, out)
        return
    features = torch.randn(1, LENGTH, model.fc.in_features)
    tokens = torch.randint(40, (1, LENGTH))
    found = []
    model.lm_head.register_forward_hook(lambda module, given, logits: found.append(logits))
    with torch.no_grad():
        model(features, tokens, torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=1)
    torch.save({"features": features, "tokens": tokens, "logits": found[0]}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
