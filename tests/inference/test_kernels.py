"""Our kernels on a CPU: right to the last bit that bfloat16 has, and each row the same whatever stands beside it."""

from __future__ import annotations

import platform
import warnings

import pytest
import torch
from torch.nn import functional as F

from headstart.heads.checkpoint import build_head
from headstart.inference import SpeculativeLM, compiled, kernels
from headstart.inference.compiled import Graph

ops = torch.ops.headstart
BF16 = torch.bfloat16
NEAREST = 2.0**-8
"""Half a step of bfloat16, relative."""

pytestmark = [
    pytest.mark.skipif(
        compiled.missing_compiler(torch.device("cpu")) is not None, reason="no C++ compiler: nothing is compiled"
    ),
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the kernels were tried on x86 only"),
]


@pytest.fixture(scope="module", autouse=True)
def library():
    assert kernels.loaded()


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 33), (64, 96), (96, 31)])
def test_linear_layers_of_any_shape_and_number_of_rows(inputs, outputs, biased):
    weight, bias = drawn(outputs, inputs, seed=1), drawn(outputs, seed=2) if biased else None
    packed = ops.pack(weight)
    for count in range(1, 30):
        rows = drawn(count, inputs)
        found = ops.linear(rows, packed, bias, outputs)
        exact = F.linear(rows.double(), weight.double(), None if bias is None else bias.double())
        assert found.shape == exact.shape and found.dtype == BF16
        assert ((found - exact).abs() <= NEAREST * exact.abs() + 1e-5 * inputs).all()
        alone = torch.cat([ops.linear(row[None], packed, bias, outputs) for row in rows])
        assert torch.equal(found, alone)


def test_linear_takes_rows_of_any_number_of_dimensions_and_strides():
    weight = drawn(40, 16, seed=1)
    rows = drawn(16, 2, 5).permute(1, 2, 0)
    assert torch.equal(
        ops.linear(rows, ops.pack(weight), None, 40),
        ops.linear(rows.reshape(10, 16).contiguous(), ops.pack(weight), None, 40).view(2, 5, 40),
    )


def attention_case(batch, groups, rows, slots, size):
    """Queries, a longer cache's keys and values, and a mask that hides a third, but never all."""
    query, key, value = drawn(batch, groups, rows, size), *drawn(2, batch, groups, slots + 9, size, seed=1)
    hidden = torch.rand((batch, 1, rows, slots), generator=torch.Generator().manual_seed(2)) < 1 / 3
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape, dtype=BF16).masked_fill_(hidden, torch.finfo(BF16).min)
    return query, key[:, :, :slots], value[:, :, :slots], mask


CASES = [
    (1, 3, 3, 300, 64),
    (2, 2, 5, 33, 32),
    (1, 1, 25, 17, 128),
    (3, 1, 13, 64, 256),
    (1, 2, 1, 1, 96),
    (1, 8, 6, 3000, 128),
]


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    """Rows of one group are then one thread's, or several threads'."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES)
def test_attention_of_any_shape(case, threads):
    query, key, value, mask = attention_case(*case)
    found = ops.attention(query, key, value, mask, 0.2)
    exact = F.scaled_dot_product_attention(*(each.double() for each in (query, key, value, mask)), scale=0.2)
    assert ((found - exact).abs() <= NEAREST * exact.abs() + 1e-5).all()


@pytest.mark.parametrize("case", CASES)
def test_attention_of_a_row_does_not_depend_on_the_others(case, threads):
    query, key, value, mask = attention_case(*case)
    found = ops.attention(query, key, value, mask, 0.2)
    for b in range(case[0]):
        for row in range(case[2]):
            at = slice(b, b + 1), slice(None), slice(row, row + 1)
            assert torch.equal(ops.attention(query[at], key[b : b + 1], value[b : b + 1], mask[at], 0.2), found[at])


@pytest.mark.parametrize("even", [False, True], ids=["drawn", "between two numbers"])
@pytest.mark.parametrize("case", CASES)
def test_attention_does_not_depend_on_where_the_slots_lie_that_are_seen(case, even):
    """Each row, its seen slots moved together: what an accepted path is when the next round reads it."""
    query, key, value, mask = attention_case(*case)
    if even:  # each key twice, with values side by side: the least change of a sum rounds to the other one
        slots = torch.arange(case[3])
        key, mask = key[:, :, slots // 2 * 2], mask[..., slots // 2 * 2]
        value = (1 + slots % 2 * 2.0**-7).to(BF16)[:, None].repeat(case[0], case[1], 1, case[4])
    found = ops.attention(query, key, value, mask, 0.2)
    for b in range(case[0]):
        for row in range(case[2]):
            at, seen = (slice(b, b + 1), slice(None), slice(row, row + 1)), mask[b, 0, row] == 0
            near = (states[b : b + 1, :, seen] for states in (key, value))
            assert torch.equal(ops.attention(query[at], *near, mask[at][..., seen], 0.2), found[at])


def wide(tiny_target):
    """A model in bfloat16 whose heads fill registers."""
    return tiny_target(dtype=BF16, vocab_size=50, head_dim=32, layers=4)


def test_a_tree_and_single_steps_say_the_same_to_the_last_bit(tiny_target):
    """A path through a tree of 12 nodes, whose places in the cache have gaps, against a step for each token."""
    target = wide(tiny_target)
    target.compile()
    text, nodes = torch.arange(40)[None], torch.arange(12)[None] + 3
    layers, path = (0, -1), (0, 2, 4, 7, 9, 11)
    seen, depths = torch.eye(12, dtype=torch.bool), torch.ones(12, dtype=torch.int64)
    seen[:, 0] = True
    for depth, node in enumerate(path):
        seen[node, list(path[:depth])] = True
        depths[node] = depth

    def cache_of_text():
        cache = target.new_cache(1)
        target.read_chunk(text, 100, cache, layers, [])
        return cache

    with torch.inference_mode():
        tree = target.forward_nodes(nodes, seen[None], depths[None], 60, cache_of_text(), layers)
        cache, one = cache_of_text(), torch.ones(1, 1, 1, dtype=torch.bool)
        for node in path:
            step = target.forward_nodes(nodes[:, [node]], one, torch.zeros(1, 1, dtype=torch.int64), 60, cache, layers)
            cache.commit(torch.ones(1, dtype=torch.int64))
            assert torch.equal(step.logits_BNV[:, 0], tree.logits_BNV[:, node])
            assert torch.equal(step.features_BNF[:, 0], tree.features_BNF[:, node])
    assert not target.graph.broken


def test_a_prompt_is_read_alike_in_pieces_of_any_size(tiny_target):
    target = wide(tiny_target)
    target.compile()
    text = torch.randint(50, (1, 200), generator=torch.Generator().manual_seed(0))
    read = []
    for sizes in ([200], [3, 150, 47]):
        cache = target.new_cache(1)
        with torch.inference_mode():
            outputs = [target.read_chunk(piece, 200, cache, (0,), [1]) for piece in text.split(sizes, dim=1)]
        read.append(torch.cat([output.features_BNF for output in outputs], dim=1))
    assert torch.equal(*read)


def test_speculation_writes_what_plain_steps_write_to_the_last_bit(tiny_target):
    """In bfloat16, where a tree and single steps differ in other engines; ties of tokens are frequent here."""
    target = wide(tiny_target)
    torch.manual_seed(2)
    head = build_head("eagle3", {"depth": 3, "feature_layers": [0, -1]}, target.info).to(BF16)
    head.initialize(target.ends, torch.ones(target.info.vocab_size, dtype=torch.int64))
    plain = SpeculativeLM.from_pretrained(target, compile=True)
    tree = SpeculativeLM.from_pretrained(target, head, tree="dynamic:9:3:3", compile=True)
    lookup = SpeculativeLM.from_pretrained(target, drafter="prompt-lookup:6", compile=True)
    settings = {"max_new_tokens": 60, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    accepted = 0
    for length in (3, 30, 45):
        row = torch.arange(length)[None] % 7
        expected = plain.generate(row, attention_mask=torch.ones_like(row), **settings)
        for lm in (tree, lookup):
            found = lm.generate(row, attention_mask=torch.ones_like(row), **settings)
            assert torch.equal(found.sequences, expected.sequences)
            assert all(map(torch.equal, found.logits, expected.logits))
            accepted += found.stats.tokens - found.stats.rounds
    assert accepted > 20


def test_graphs_call_our_kernels_and_drop_what_they_replace(tiny_target, monkeypatch):
    swapped = []
    monkeypatch.setattr(
        kernels.OwnKernels,
        "__call__",
        lambda self, graph, call=kernels.OwnKernels.__call__: (call(self, graph), swapped.append(graph))[0],
    )
    target = wide(tiny_target)
    lm = SpeculativeLM.from_pretrained(target, compile=True)
    row = torch.arange(12)[None]
    lm.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=4, do_sample=False)
    targets = [str(node.target) for node in swapped[0].nodes if node.op == "call_function"]
    layers = target.info.num_layers
    assert targets.count("headstart.linear.default") == 4 * layers + 1  # q, k and v together; gate and up too
    assert targets.count("headstart.attention.default") == layers
    assert not any("mkldnn" in name or "scaled_dot" in name for name in targets)
    assert not any(value.is_mkldnn for value in vars(swapped[0].owning_module).values() if torch.is_tensor(value))


def test_a_graph_hands_on_bias_and_scale():
    query, key, value, mask = attention_case(1, 2, 3, 40, 32)
    layer = torch.nn.Linear(32, 40, dtype=BF16).requires_grad_(False)

    def both(rows, *given):
        return layer(rows), F.scaled_dot_product_attention(*given, scale=0.3)

    with torch.inference_mode():
        rows = drawn(5, 32)
        graph = Graph(both, "both", torch.device("cpu"))
        linear, attention = graph("kind", list, list, rows, query, key, value, mask)
    assert torch.equal(linear, ops.linear(rows, ops.pack(layer.weight), layer.bias, 40)) and layer.bias.any()
    assert torch.equal(attention, ops.attention(query, key, value, mask, 0.3))


def test_without_the_library_graphs_keep_torchs_kernels(tiny_target, monkeypatch, tmp_path):
    broken = tmp_path / "kernels.cpp"
    broken.write_text("this is no C++\n")
    monkeypatch.setattr(kernels, "SOURCE", broken)
    kernels.loaded.cache_clear()
    try:
        row = torch.arange(12)[None]
        settings = {"attention_mask": torch.ones_like(row), "max_new_tokens": 4, "min_new_tokens": 4}
        lm = SpeculativeLM.from_pretrained(wide(tiny_target), compile=True)
        with pytest.warns(UserWarning, match=r"graphs keep torch's kernels: kernels.cpp could not be compiled") as told:
            assert lm.generate(row, do_sample=False, **settings).sequences.shape == (1, 16)
        assert sum("keep torch's kernels" in str(each.message) for each in told) == 1
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*without compiling")
            lm.generate(row, do_sample=False, **settings)
    finally:
        kernels.loaded.cache_clear()
