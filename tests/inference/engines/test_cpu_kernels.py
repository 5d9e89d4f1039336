"""Our kernels on a CPU: a float32 model's own logits from fewer bytes, each row alike whatever
stands beside it."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import calls_of, check_identity, head_for, pairs, random_ids
from messages import warned
from torch.nn import functional as F
from transformers import (
    Gemma3TextConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto import AutoModelForCausalLM

from headstart.inference import Drafter, SpeculativeLM, Target
from headstart.inference.drafters.base import NoDraft
from headstart.inference.engines import cpu_decoder, cpu_kernels
from headstart.inference.engines.cpu_decoder import CpuEngine, PackedBlock, packed_head
from headstart.inference.engines.cpu_kernels import FORMATS, PackedLinear, linear, pack
from headstart.inference.engines.model_engine import ModelEngine
from headstart.inference.trees.tree import NewNodes, framed

FLOAT, BF16 = torch.float32, torch.bfloat16
ROW = torch.tensor([5, 6, 7, 8])
SIZES = {
    "vocab_size": 90,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
KNOWN = {
    "llama": LlamaConfig(**SIZES),
    "one group": LlamaConfig(**SIZES | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "sliding": MistralConfig(**SIZES, sliding_window=20),
    "both kinds": Qwen2Config(
        **SIZES, sliding_window=20, use_sliding_window=True, max_window_layers=2
    ),
}
OTHERS = {
    "gemma3": Gemma3TextConfig(**SIZES, query_pre_attn_scalar=32, sliding_window=20),
    "granite": GraniteConfig(**SIZES, residual_multiplier=0.3),
    "gpt-neox": GPTNeoXConfig(**SIZES),
    "narrow heads": LlamaConfig(**SIZES | {"head_dim": 16}),
    "gelu": LlamaConfig(**SIZES, hidden_act="gelu"),
}

pytestmark = [
    pytest.mark.isa,
    pytest.mark.skipif(
        cpu_kernels.library() is None, reason="no C++ compiler: there are no kernels"
    ),
]


@pytest.fixture
def threads(request):
    """Rows of one group are then one thread's, or several threads'."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def in_threads(names, *axes):
    """Every two of these values, and numbers of threads, together."""
    return pytest.mark.parametrize(
        (*names, "threads"), pairs(*axes, [1, 2, 5]), indirect=["threads"]
    )


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def held(name, outputs, inputs):
    """Weights that a format holds exactly, and no shorter one."""
    weight = normal(outputs, inputs, seed=1)
    if name == "float32":
        return weight
    if name == "bfloat16":
        return weight.to(BF16).float()
    bits = int(name[-1])
    groups = (outputs, inputs // 32, 32)
    numbers = random_ids(2**bits, *groups, seed=2).float()
    numbers[..., 0] = 2**bits - 1
    numbers[..., 1] = 0
    numbers = numbers if bits == 4 else numbers.clamp(min=1)
    scale = normal(*groups[:2], 1, seed=3).abs().half().float()
    offset = normal(*groups[:2], 1, seed=4).half().float() if bits == 4 else -128 * scale
    return (numbers * scale + offset).flatten(1)


def unpacked(packed):
    return linear(packed, torch.eye(packed.inputs)).T


@pytest.mark.parametrize("outputs", [1, 33, 96])
@pytest.mark.parametrize("name", FORMATS)
def test_weights_lie_in_the_shortest_format_that_holds_them_exactly(name, outputs):
    weight = held(name, outputs, 64)
    packed = pack(weight)
    assert packed.format == name
    assert torch.equal(unpacked(packed), weight)
    nearly = weight.clone()
    nearly[-1, -1] *= 1 + 2.0**-20
    assert torch.equal(unpacked(pack(nearly)), nearly)


def centered(sign):
    """Weights of GGUF that are centered on zero."""
    numbers = random_ids(16, 40, 2, 32, seed=2) - 8
    numbers[..., 0] = -8
    scale = sign * normal(40, 2, 1).abs().half().float()
    return (scale * numbers).flatten(1)


def of_one_value():
    """Groups of one value and of zeros."""
    weight = torch.zeros(40, 64)
    weight[3, 32:] = 0.5
    return weight


@pytest.mark.parametrize("weight", [centered(1), centered(-1), of_one_value()])
def test_weights_of_few_steps_are_found(weight):
    packed = pack(weight)
    assert packed.format == "affine4"
    assert torch.equal(unpacked(packed), weight)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_that_need_not_be_exact_take_the_nearest_of_255_steps(name):
    weight = held(name, 40, 64)
    weight[3, 32:] = 0
    packed = pack(weight, rounded=True)
    found = unpacked(packed)
    assert packed.format == ("affine4" if name == "affine4" else "affine8")
    if name.startswith("affine"):
        assert torch.equal(found, weight)
    groups = weight.unflatten(1, (-1, 32))
    steps = (groups.abs().amax(dim=2, keepdim=True) / 127).half().float()
    errors = (found.unflatten(1, (-1, 32)) - groups).abs()
    assert (errors <= 0.5001 * steps + 127 * 2.0**-11 * steps).all()


@pytest.mark.parametrize("weight", [normal(40, 48), normal(40, 64) * 1e8])
def test_weights_that_do_not_fit_into_eight_bits_stay_exact(weight):
    packed = pack(weight, rounded=True)
    assert packed.format == "float32"
    assert torch.equal(unpacked(packed), weight)


@in_threads(("name", "biased"), FORMATS, [False, True])
def test_linear_layers_of_any_number_of_rows(name, biased, threads):
    for inputs, outputs in ((32, 1), (96, 33), (64, 160)):
        weight = held(name, outputs, inputs)
        bias = normal(outputs, seed=5) if biased else torch.zeros(outputs)
        packed = pack(weight, bias if biased else None)
        rows = normal(40, inputs)
        alone = torch.cat([linear(packed, row[None]) for row in rows])
        exact = F.linear(rows.double(), weight.double(), bias.double())
        limit = 1e-6 * F.linear(rows.abs(), weight.abs()) + 1e-6
        for count in (*range(1, 16), 24, 25, 40):
            found = linear(packed, rows[:count])
            assert found.shape == (count, outputs)
            assert ((found - exact[:count]).abs() <= limit[:count]).all()
            assert torch.equal(found, alone[:count])


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", FORMATS)
def test_inputs_that_are_no_numbers_give_none(name, broken):
    rows = normal(3, 64)
    rows[1, 40] = broken
    found = linear(pack(held(name, 40, 64)), rows)
    assert not found[1].isfinite().any() and found[[0, 2]].isfinite().all()


def test_odd_widths_and_any_leading_shape():
    weight = normal(40, 17)
    rows = normal(17, 2, 5).permute(1, 2, 0)
    assert torch.allclose(linear(pack(weight), rows), F.linear(rows, weight), atol=1e-5)


def random_target(config, dtype=FLOAT, seed=0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    for name, parameter in model.named_parameters():
        parameter.data *= 6 if parameter.ndim > 1 else 1
        if name.endswith("bias"):
            parameter.data.normal_(std=0.2)
        elif parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return Target(model.to(dtype).eval().requires_grad_(False))


@in_threads(("name", "dtype"), KNOWN, [FLOAT, BF16])
def test_a_decoder_in_the_kernels_gives_the_models_logits_and_features(name, dtype, threads):
    target = random_target(KNOWN[name], dtype)
    text = random_ids(90, 2, 70)
    layers = (0, 2, -1)
    lengths = torch.tensor([70, 70])
    expected = target.model(text, output_hidden_states=True)
    target.compile()
    assert isinstance(target.engine, CpuEngine)
    cache = target.engine.new_cache(2)
    found = target.engine.read_chunk(text, 70, cache, layers, list(range(70)))
    assert torch.equal(cache.lengths_B, lengths)
    states = torch.cat([expected.hidden_states[i] for i in (1, 3, 4)], dim=-1)
    close = 1e-4 if dtype == FLOAT else 0.1
    for ours, theirs in ((found.logits_BNV, expected.logits), (found.features_BNF, states)):
        assert (ours.float() - theirs.float()).abs().max() <= close * theirs.float().abs().max()


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_not_mistaken_and_get_their_linear_layers(name):
    target = random_target(OTHERS[name])
    lm = SpeculativeLM.from_pretrained(target, drafter="prompt-lookup")
    assert isinstance(target.engine, ModelEngine) and target.engine.copies_weights
    assert any(isinstance(module, PackedLinear) for module in target.engine.model.modules())
    assert not any(isinstance(module, PackedLinear) for module in target.model.modules())
    check_identity(lm, [ROW], max_new_tokens=30)


@pytest.mark.parametrize("layers", [(), (-1,), (0,), (1, -1)])
def test_a_batch_of_prompts_asks_for_one_row_of_logits_each(monkeypatch, layers):
    """Whether or not a drafter reads the state that the logits are made of."""

    class Reader(Drafter):
        max_nodes, feature_layers = 1, layers

        def propose(self, roots_B):
            return NoDraft().propose(roots_B)

    target = random_target(KNOWN["llama"])
    lm = SpeculativeLM(target, Reader()).compile()
    assert isinstance(target.engine, CpuEngine)
    read = calls_of(monkeypatch, cpu_decoder, "linear")
    rows = [torch.arange(1 + row, 1 + row + length) for row, length in enumerate((3, 9, 5, 7))]
    check_identity(lm, rows, max_new_tokens=1)
    assert sum(states.shape[:-1].numel() for _, states, *_ in read) == 4


@pytest.mark.parametrize("asked", ["before", "after"])
def test_who_asks_the_model_for_its_states_does_not_change_ours(asked):
    """transformers hooks a model at the first such call, and the copy in the kernels at its own."""
    target = random_target(OTHERS["gemma3"])
    text = torch.arange(1, 9)[None]
    model = target.model
    if asked == "before":
        model(text, output_hidden_states=True)
    target.compile()
    expected = model(text, output_hidden_states=True).hidden_states[-1]
    for _ in range(2):
        cache = target.engine.new_cache(1)
        found = target.engine.read_chunk(text, 8, cache, (-1,), [])
        assert torch.allclose(found.features_BNF, expected, atol=1e-5)


@in_threads(("name", "dtype"), ["llama", "qwen3", "both kinds"], [FLOAT, BF16])
def test_a_tree_and_single_steps_say_the_same_to_the_last_bit(name, dtype, threads):
    target = random_target(KNOWN[name], dtype)
    target.compile()
    text = random_ids(90, 1, 60, seed=1)
    tree = random_ids(90, 1, 8, seed=2)
    parents = [-1, 0, 0, 1, 1, 2, 3, 6]
    seen = torch.eye(8, dtype=torch.bool)
    for node, parent in enumerate(parents[1:], start=1):
        seen[node] |= seen[parent]
    layers = (0, -1)
    cache = target.engine.new_cache(1)
    target.engine.read_chunk(text, 60, cache, layers, [])
    nodes = NewNodes(tree, framed(seen[None]), seen.sum(-1)[None] - 1)
    output = target.engine.forward_nodes(nodes, 60, cache, layers)
    for leaf in (4, 5, 7):
        path = seen[leaf].nonzero()[:, 0]
        alone = target.engine.new_cache(1)
        target.engine.read_chunk(text, 60, alone, layers, [])
        for step, node in enumerate(path):
            one = target.engine.forward_chain(tree[:, node, None], 60 + step, alone, layers)
            alone.advance(torch.tensor([1]))
            assert torch.equal(one.logits_BNV[:, 0], output.logits_BNV[:, node])
            assert torch.equal(one.features_BNF[:, 0], output.features_BNF[:, node])


def test_a_prompt_is_read_alike_in_pieces_of_any_size():
    target = random_target(KNOWN["llama"])
    target.compile()
    text = random_ids(90, 2, 600)
    found = []
    for size in (1, 7, 600):
        cache = target.engine.new_cache(2)
        read = 30 if size == 1 else 600
        logits = []
        for part in text[:, :read].split(size, dim=1):
            every = list(range(part.shape[1]))
            logits.append(target.engine.read_chunk(part, 600, cache, (0,), every).logits_BNV)
        found.append(torch.cat(logits, dim=1)[:, :30])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])


HEADS = {
    "dflash": {"block_size": 4},
    "dspark": {"block_size": 3, "markov_rank": 4},
    "eagle3": {"depth": 3, "feature_layers": [0, 1, -1]},
    "eagle": {"depth": 3},
    "mtp": {"depth": 3},
    "medusa": {"num_heads": 3},
    "hydra++": {"num_heads": 3},
}


def head_named(target, name):
    return head_for(target, name, seed=2, **HEADS[name])


@pytest.mark.parametrize("dtype", [FLOAT, BF16])
@pytest.mark.parametrize("name", HEADS)
def test_heads_draft_in_the_kernels_nearly_as_with_weights_of_eight_bits(name, dtype):
    target = random_target(KNOWN["llama"], dtype)
    head = head_named(target, name)
    packed = packed_head(head)
    for module in head.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(unpacked(pack(module.weight, rounded=True)))
    head = head.to(dtype)
    assert any(isinstance(module, PackedLinear | PackedBlock) for module in packed.modules())
    target.compile()
    features = normal(2, 5, 64 * len(head.feature_layers), seed=3).to(dtype)
    tokens = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    found = []
    with torch.inference_mode():
        for each, modules in ((head, target.modules), (packed, target.draft_modules)):
            state = each.begin(modules, 2, 40, 3, 9)
            state = each.observe(state, features, tokens, torch.tensor([5, 3]))
            first, state = each.expand(state, tokens[:, -1:], torch.full((2, 1), -1))
            second, state = each.expand(state, tokens[:, :2], torch.zeros(2, 2, dtype=torch.int64))
            third, _ = each.expand(state, tokens[:, :2], torch.tensor([[0, 1], [1, 1]]))
            found.append([logits.float() for logits in (first, second, third)])
    for plain, fast in zip(*found):
        assert (plain - fast).abs().max() <= (1e-4 if dtype == FLOAT else 0.05) * plain.abs().max()


def test_a_target_that_was_made_in_inference_mode_is_compiled():
    with torch.inference_mode():
        target = random_target(KNOWN["llama"])
        lm = SpeculativeLM.from_pretrained(target, drafter="prompt-lookup")
    assert target.compiled
    check_identity(lm, [ROW])


def test_a_head_drafts_with_the_lm_head_that_the_target_runs_now():
    target = random_target(KNOWN["llama"])
    head = head_named(target, "eagle")
    lm = SpeculativeLM.from_pretrained(target, head, tree="chain:2", adaptive=False, compile=False)
    states = normal(2, 64, seed=3)
    before = lm.drafter.model_state.modules.logits(states)
    assert torch.equal(before, target.modules.logits(states))
    lm.compile()
    assert torch.equal(lm.drafter.model_state.modules.logits(states), target.engine.lm_head(states))
    with torch.no_grad():
        target.modules.lm_head.weight.mul_(2)
    lm.compile()
    assert torch.allclose(lm.drafter.model_state.modules.logits(states), 2 * before, atol=1e-4)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As on a machine that has compiled nothing yet; its compiler copies the library that this one
    has compiled, and adds a letter to the file "runs"."""
    compiler = tmp_path / "c++"
    library = cpu_kernels.library()._name
    runs = tmp_path / "runs"
    compiler.write_text(
        f'#!/bin/sh\nprintf x >> "{runs}"\nfor last; do :; done\ncp "{library}" "$last"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    cpu_kernels.library.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    cpu_kernels.library.cache_clear()
    cpu_kernels.library()


def loaded_anew():
    """As by another process."""
    cpu_kernels.library.cache_clear()
    return cpu_kernels.library()


def compiled_times(machine):
    return len((machine / "runs").read_text())


def test_the_library_lies_in_a_folder_of_the_users_own(fresh):
    assert loaded_anew() is not None
    folder = fresh / "cache"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(path.suffix for path in folder.iterdir()) == [".sha256", ".so"]
    assert loaded_anew() is not None
    assert compiled_times(fresh) == 1


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        (".so", lambda whole: whole[: len(whole) // 2]),
        (".so", lambda whole: whole[: -len(whole) // 10] + bytes(len(whole) // 10)),
        (".so", lambda whole: whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:]),
        (".so", lambda whole: b""),
        (".sha256", lambda whole: None),
        (".sha256", lambda whole: b"0"),
        (".sha256", lambda whole: b"\xff\xfe"),
    ],
    ids=["half", "zeros at its end", "a bit", "empty", "no sum", "another sum", "no text"],
)
def test_a_library_that_is_not_whole_is_made_anew(fresh, kind, spoil):
    """Most of these crash a process that loads them."""
    assert loaded_anew() is not None
    (path,) = (fresh / "cache").glob("*" + kind)
    whole = path.read_bytes()
    path.unlink()  # a library that is loaded must not be written to
    spoilt = spoil(whole)
    if spoilt is not None:
        path.write_bytes(spoilt)
    for _ in range(2):  # the next process finds it
        assert loaded_anew() is not None
        assert path.read_bytes() == whole
        assert compiled_times(fresh) == 2


def test_a_cache_that_cannot_be_written_is_done_without(fresh, monkeypatch):
    (fresh / "file").write_text("")
    (fresh / "temporary").mkdir()
    monkeypatch.setenv("HEADSTART_CACHE", str(fresh / "file" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(fresh / "temporary"))
    with warned("process", str(fresh / "file")):
        assert loaded_anew() is not None
    assert not list((fresh / "temporary").iterdir())  # nothing is left


@pytest.mark.skipif(
    os.name != "posix" or os.getuid() != 0, reason="only root gives a file to another user"
)
@pytest.mark.parametrize("place", ["library", "folder", "folder above", "link"])
def test_a_library_that_another_user_may_have_put_there_is_not_loaded(fresh, monkeypatch, place):
    assert loaded_anew() is not None
    cache = fresh / "cache"
    (library,) = cache.glob("*.so")
    if place == "library":
        os.chown(library, 65534, 65534)
    elif place == "folder":
        cache.chmod(0o777)
    elif place == "folder above":
        os.chown(fresh, 65534, 65534)
    else:
        (fresh / "linked").symlink_to(cache)
        os.lchown(fresh / "linked", 65534, 65534)
        monkeypatch.setenv("HEADSTART_CACHE", str(fresh / "linked"))
    before = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    with warned("user", os.environ["HEADSTART_CACHE"]):
        loaded = loaded_anew()
    os.chown(fresh, 0, 0)
    assert loaded is not None and not Path(loaded._name).is_relative_to(fresh)
    assert {path.name: path.stat().st_mtime_ns for path in cache.iterdir()} == before  # nor written


def test_folders_of_the_user_and_of_root_are_trusted_and_sticky_ones_too(tmp_path):
    inner = tmp_path / "sticky" / "own"
    inner.mkdir(parents=True)
    (tmp_path / "sticky").chmod(0o1777)
    assert not cpu_kernels.others_can_write(inner / "not there yet")
    (tmp_path / "sticky").chmod(0o777)
    assert cpu_kernels.others_can_write(inner / "file")


@pytest.mark.parametrize(
    ("group", "members", "trusted"),
    [("somebody", [], True), ("somebody", ["other"], False), ("users", [], False)],
)
def test_a_group_may_write_that_is_its_owners_alone(tmp_path, monkeypatch, group, members, trusted):
    monkeypatch.setattr("pwd.getpwuid", lambda _: SimpleNamespace(pw_name="somebody"))
    entry = SimpleNamespace(gr_name=group, gr_mem=members)
    monkeypatch.setattr("grp.getgrgid", lambda _: entry)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o770)
    assert cpu_kernels.others_can_write(tmp_path / "shared" / "file") != trusted


@pytest.mark.parametrize("compiler", ["/nowhere/c++", "false", "cat /nowhere"])
def test_without_a_compiler_a_warning_says_so_once_and_all_runs_as_it_is(
    fresh, monkeypatch, compiler
):
    monkeypatch.setenv("CXX", compiler)
    target = random_target(KNOWN["llama"])
    with warned("cpu_kernels.cpp"):
        lm = SpeculativeLM.from_pretrained(target, head_named(target, "eagle3"))
    assert type(target.engine) is ModelEngine
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SpeculativeLM.from_pretrained(target)
        check_identity(lm, [ROW])
