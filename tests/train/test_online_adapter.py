"""A head follows a policy: it learns from its rollouts, and disturbs neither its training nor its seeds."""

from __future__ import annotations

import functools

import pytest
import torch

from headstart.heads import HEADS, build_head
from headstart.inference import SpeculativeLM, Target
from headstart.train import OnlineAdapter
from headstart.train.data.chat_template import Example
from headstart.train.judging import Comparison
from headstart.train.online_adapter import distinct

NEW_TOKENS = 12
OPTIONS = {
    "medusa": {"num_heads": 2},
    "hydra": {"num_heads": 2},
    "eagle": {"depth": 2},
    "eagle3": {"depth": 2, "feature_layers": [0, -1]},
}
"""Heads of both kinds of states, recorded and not."""


@pytest.fixture
def policy(tools):
    """A tiny model that is being trained: its weights ask for gradients."""
    return tools.build_model(dtype=torch.float32, seed=5).train()


def decoder(model, kind="eagle3", compile=False, **options):
    """A decoder with an untrained head."""
    target = Target(model)
    torch.manual_seed(0)
    head = build_head(kind, OPTIONS[kind], target.info).to(target.dtype)
    head.initialize(target.modules, torch.ones(target.info.vocab_size, dtype=torch.int64))
    options = {"tree": "chain:2", "fallback": False, **options}
    return SpeculativeLM.from_pretrained(target, head.eval(), compile=compile, **options)


def rollouts_of(model, method, prompts=3, generations=2, seed=1, new_tokens=NEW_TOKENS, temperature=0.7):
    """Answers as a trainer of policies asks for them: sampled, several to each padded prompt."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 250, (prompts, 6), generator=random).repeat_interleave(generations, 0)
    mask = torch.ones_like(ids)
    mask[::3, :2] = 0
    settings = {"max_new_tokens": new_tokens, "do_sample": True, "temperature": temperature, "eos_token_id": 3}
    with torch.no_grad():
        return model.generate(ids, attention_mask=mask, pad_token_id=0, custom_generate=method, **settings)


def update(model, seed):
    """A step of the policy's own training."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn_like(weight))


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_head_learns_and_policy_and_seeds_stay_as_they_were(policy, tokenizer, kind, compile):
    lm, again = decoder(policy, kind, compile), decoder(policy, kind, compile)
    adapter = OnlineAdapter(lm, tokenizer, lr=3e-3, epochs=2, batch_size=4, judge_every=2)
    plain = again.custom_generate()
    started = {name: weight.clone() for name, weight in lm.head.state_dict().items()}
    for step in range(3):
        before = {name: weight.clone() for name, weight in policy.state_dict().items()}
        torch.manual_seed(step)
        expected = rollouts_of(policy, plain)
        expected_random = torch.get_rng_state()
        torch.manual_seed(step)
        found = rollouts_of(policy, adapter)
        assert torch.equal(found, expected) and torch.equal(torch.get_rng_state(), expected_random)
        assert policy.training and all(weight.grad is None for weight in policy.parameters())
        assert all(torch.equal(weight, before[name]) for name, weight in policy.state_dict().items())
        update(policy, step)
    assert [learned.answers for learned in adapter.history] == [6, 6, 6]
    assert [learned.comparison is not None for learned in adapter.history] == [False, False, True]
    changed = [not torch.equal(weight, started[name]) for name, weight in adapter.head.state_dict().items()]
    assert any(changed)
    assert type(adapter.head) is HEADS[kind]


def test_a_better_copy_takes_the_heads_place_and_a_worse_one_does_not(policy, tokenizer):
    lm = decoder(policy)
    first = lm.head
    adapter = OnlineAdapter(lm, tokenizer, lr=1e-2, epochs=4, judge_every=1)
    policy.generate = functools.partial(policy.generate, custom_generate=adapter)
    for _ in range(8):  # the same prompts again, as in reinforcement learning
        rollouts_of(policy, adapter, prompts=8, generations=1, temperature=0.01)
        if adapter.history[-1].swapped:
            break
    last = adapter.history[-1]
    assert last.swapped and lm.head is not first
    assert all(last.comparison.better(tree) for tree in last.comparison.new)
    for own, drafting in zip(adapter.head.parameters(), lm.head.parameters(), strict=True):
        assert own is not drafting and not drafting.requires_grad
    served = lm.head
    for weight in adapter.head.parameters():
        weight.data.normal_(std=0.2)
    rollouts_of(policy, adapter, prompts=8, generations=1, temperature=0.01)
    assert not adapter.history[-1].swapped and lm.head is served
    comparison = adapter.history[-1].comparison
    assert not any(comparison.better(tree) for tree in comparison.new)


def test_both_heads_draft_along_every_answer_of_a_prompt(policy, tokenizer, tmp_path):
    lm = decoder(policy)
    adapter = OnlineAdapter(lm, tokenizer, judge_every=1)
    rollouts_of(policy, adapter)
    rollouts_of(policy, adapter, prompts=2, generations=3)
    comparison = adapter.history[-1].comparison
    (old,) = comparison.old.values()
    (new,) = comparison.new.values()
    assert len(old.rows) == len(new.rows) >= 5  # an answer is left out if it is shorter
    assert old.tokens == new.tokens


def test_comparisons_decide_together_until_a_head_is_swapped(policy, tokenizer, monkeypatch):
    adapter = OnlineAdapter(decoder(policy), tokenizer, lr=1e-9, judge_every=1)
    for seed in range(4):
        rollouts_of(policy, adapter, seed=seed)
    alone = [learned.comparison and learned.comparison.answers for learned in adapter.history]
    assert alone[0] is None and alone[1] < alone[2] < alone[3]
    monkeypatch.setattr(Comparison, "better", lambda self, tree: True)
    for seed in range(4, 6):
        rollouts_of(policy, adapter, seed=seed)
    assert adapter.history[-2].comparison.answers > alone[3]
    assert adapter.history[-1].comparison.answers < alone[3], "those with the head before tell nothing of this one"


def test_answers_to_one_prompt_are_told_apart_by_their_first_tokens():
    def answer(*tokens):
        return Example([1, 2, *tokens], [False, False] + [True] * len(tokens))

    found, new_tokens = distinct([answer(5, 6, 7, 8), answer(5, 9, 7, 8), answer(5)], 4)
    assert [example.prompt for example in found] == [[1, 2, 5, 6], [1, 2, 5, 9]]
    assert new_tokens == 2
    found, new_tokens = distinct([answer(5, 6), answer(6, 6)], 2)
    assert [example.prompt for example in found] == [[1, 2, 5], [1, 2, 6]]
    assert distinct([answer(5, 6)], 2)[1] == 2


def test_answers_of_one_token_are_learned_from_and_not_judged(policy, tokenizer):
    adapter = OnlineAdapter(decoder(policy), tokenizer, judge_every=1)
    for _ in range(2):
        rollouts_of(policy, adapter, new_tokens=1)
    assert [learned.comparison for learned in adapter.history] == [None, None]


@pytest.mark.parametrize("write", ["optimizer", "load_state_dict", "data"])
def test_a_recording_of_other_weights_is_refused(policy, tokenizer, tools, tmp_path, write):
    lm = decoder(policy)
    adapter = OnlineAdapter(lm, tokenizer)
    with lm.record(tmp_path, tokenizer=tokenizer, format="float32"):
        rollouts_of(policy, lm.custom_generate())
    assert adapter.learn(tmp_path).answers == 6, "a folder of the caller's own"
    if write == "optimizer":
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
        policy(torch.arange(5, 15)[None], labels=torch.arange(5, 15)[None]).loss.backward()
        optimizer.step()
    elif write == "data":
        for weight in policy.parameters():
            weight.data.copy_(weight * 1.01)
    else:
        policy.load_state_dict(tools.build_model(dtype=torch.float32, seed=6).state_dict())
    with pytest.raises(ValueError, match=r"was recorded with weights \w+, and the target has \w+ now: learn from"):
        adapter.learn(tmp_path)
    with pytest.raises(ValueError, match=r"no recorded answers in .*; `lm.record"):
        adapter.learn(tmp_path / "none")
    assert len(adapter.history) == 1


def test_calls_between_are_not_recorded_and_recording_may_be_off(policy, tokenizer, monkeypatch):
    adapter = OnlineAdapter(decoder(policy), tokenizer, learn_every=3)
    for _ in range(7):
        rollouts_of(policy, adapter, prompts=1)
    assert len(adapter.history) == 2
    monkeypatch.setenv("HEADSTART_NO_RECORD", "1")
    adapter.learn_every = 1
    with pytest.warns(UserWarning, match="HEADSTART_NO_RECORD is set"):
        rollouts_of(policy, adapter, prompts=1)
    assert len(adapter.history) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr must be above 0, not 0.0"),
        ({"epochs": 0}, "epochs must be at least 1, not 0"),
        ({"judge_every": 0}, "judge_every must be at least 1, not 0"),
    ],
)
def test_what_cannot_learn_is_refused(policy, tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        OnlineAdapter(decoder(policy), tokenizer, **options)
    plain = SpeculativeLM.from_pretrained(Target(policy), drafter="prompt-lookup", compile=False)
    with pytest.raises(ValueError, match="a decoder without a head has none to adapt"):
        OnlineAdapter(plain, tokenizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_policy_in_another_format_is_followed(tools, tokenizer, dtype):
    model = tools.build_model(dtype=dtype, seed=5)
    lm = decoder(model)
    adapter = OnlineAdapter(lm, tokenizer, lr=3e-3, epochs=8, judge_every=1)
    for _ in range(2):
        rollouts_of(model, adapter, temperature=0.01)
    assert adapter.history[1].loss < adapter.history[0].loss
    assert next(adapter.head.parameters()).dtype == torch.promote_types(dtype, torch.float32)
