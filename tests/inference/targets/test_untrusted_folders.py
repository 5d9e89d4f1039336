"""A target's folder from somebody else: its code is not run, and what is broken is named."""

from __future__ import annotations

import builtins
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from axes import TARGETS, written_as_gguf
from messages import refused
from transformers import AutoModelForCausalLM

from headstart.addons.certify.engines import end_tokens_of
from headstart.inference import SpeculativeLM, Target, load_tokenizer
from headstart.inference.outer_modules import OuterTarget
from headstart.inference.targets.dtypes import chosen_dtype
from headstart.inference.targets.loading import config_of, load_config, load_model, target_facts
from headstart.inference.text.chat_template import load_chat_tokenizer, render, variables_read
from headstart.train.config import DataConfig, TrainConfig
from headstart.train.features.placement import empty_model, packing_of


def training(folder):
    return TrainConfig(
        target=str(folder),
        output=str(folder / "output"),
        head={"type": "eagle3"},
        data=DataConfig(sources=["data.jsonl"]),
    )


READERS = {
    "config": config_of,
    "facts": target_facts,
    "model": lambda folder: Target.load(folder, torch.float32, "cpu"),
    "outer modules": lambda folder: OuterTarget.load(folder, torch.float32, "cpu"),
    "tokenizer": load_tokenizer,
    "packing": lambda folder: packing_of(training(folder)),
    "empty model": lambda folder: empty_model(training(folder), torch.float32),
    "dtype": lambda folder: chosen_dtype("float32", folder, torch.device("cpu")),
}
EVIL = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({ran!r}).touch()
class C(LlamaConfig): pass
class M(LlamaForCausalLM): pass
class T(PreTrainedTokenizerFast): pass
"""


@pytest.fixture
def target_copy(target_folder, tmp_path):
    return shutil.copytree(target_folder, tmp_path / "target")


def edited(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refusal(read, target_copy, default):
    """What a reader says of a folder that it refuses; `default` if it reads it."""
    try:
        read(target_copy)
    except ValueError as error:
        return str(error)
    return default


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("of", ["config", "tokenizer"])
def test_no_code_of_a_folder_is_run_and_nobody_is_asked(
    target_copy, tmp_path, monkeypatch, reader, of
):
    ran = tmp_path / "ran"
    (target_copy / "evil.py").write_text(EVIL.format(ran=str(ran)))
    asked = []
    monkeypatch.setattr(builtins, "input", lambda *words: asked.append(words) or "y")
    if of == "tokenizer":
        named = {"AutoTokenizer": [None, "evil.T"]}
        edited(target_copy / "tokenizer_config.json", tokenizer_class="T", auto_map=named)
    else:
        named = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoModel": "evil.M"}
        edited(target_copy / "config.json", model_type="evil", architectures=["M"], auto_map=named)
    assert str(target_copy) in refusal(READERS[reader], target_copy, default=str(target_copy))
    assert not asked
    assert not ran.exists()


def test_code_runs_where_the_caller_says_so(target_copy, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    ran = tmp_path / "ran"
    (target_copy / "evil.py").write_text(EVIL.format(ran=str(ran)))
    named = {"AutoTokenizer": [None, "evil.T"]}
    edited(target_copy / "tokenizer_config.json", tokenizer_class="T", auto_map=named)
    load_tokenizer(target_copy, trust_remote_code=True)
    assert ran.exists()


DEEP = "[" * 200_000
BROKEN = {
    "config deep": ("config.json", DEEP),
    "config list": ("config.json", "[1]"),
    "config null": ("config.json", "null"),
    "config control": ("config.json", '{"model_type": "\\u001b[2J\\b"}'),
    "config types": ("config.json", '{"model_type": "llama", "hidden_size": "x"}'),
    "config digits": ("config.json", '{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}"),
    "config binary": ("config.json", "\0\ud800"),
    "weights empty": ("model.safetensors", ""),
    "weights length": ("model.safetensors", "\x7f" * 8 + "{}"),
    "tokenizer deep": ("tokenizer.json", DEEP),
    "tokenizer list": ("tokenizer.json", "[]"),
    "tokenizer no model": ("tokenizer.json", '{"version": "1.0"}'),
    "tokenizer config list": ("tokenizer_config.json", "[1]"),
    "tokenizer config deep": ("tokenizer_config.json", DEEP),
    "generation list": ("generation_config.json", "[1]"),
    "generation deep": ("generation_config.json", DEEP),
    "generation type": ("generation_config.json", '{"eos_token_id": {"a": 1}}'),
    "generation text": ("generation_config.json", '{"bos_token_id": ["x"]}'),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_gives_one_line_that_names_the_folder(target_copy, what):
    file, text = BROKEN[what]
    (target_copy / file).write_text(text, errors="surrogatepass")
    for read in (*READERS.values(), lambda place: end_tokens_of(place, load_tokenizer(place))):
        message = refusal(read, target_copy, default=str(target_copy))
        assert str(target_copy) in message
        assert message.isprintable()
        assert len(message) < 1000


VAST = {"model_type": "qwen2", "num_hidden_layers": 10**9}
BUILT = ["outer modules", "empty model", "model"]
UNUSABLE = [
    # more layers than can be built, and widths that the files cannot hold
    ("config.json", {"num_hidden_layers": 10**9}, ["config", "model"], "1e+09"),
    ("config.json", {"num_local_experts": 10**9}, ["config", "model"], "1e+09"),
    ("config.json", {"text_config": VAST}, ["config", "model"], "1e+09"),
    ("config.json", {"hidden_size": 10**7}, ["model"], "'hidden_size': 10000000"),
    ("config.json", {"intermediate_size": 10**7}, ["model"], "'intermediate_size': 10000000"),
    ("config.json", {"vocab_size": 10**7}, ["model"], "'vocab_size': 10000000"),
    # values of another type, some of which transformers takes unseen
    ("config.json", {"rope_parameters": {"rope_type": []}}, BUILT, ""),
    ("config.json", {"head_dim": {}}, BUILT, ""),
    ("config.json", {"dtype": {"a": "float32"}}, ["dtype"], "dtype"),
    ("generation_config.json", {"bos_token_id": ["x"]}, ["model", "outer modules"], "bos_token_id"),
    ("generation_config.json", {"eos_token_id": ["x"]}, ["model", "outer modules"], "eos_token_id"),
    ("tokenizer_config.json", {"model_max_length": [7]}, ["tokenizer"], "model_max_length"),
    ("tokenizer_config.json", {"model_max_length": {"a": 1}}, ["tokenizer"], "model_max_length"),
]


@pytest.mark.parametrize(("file", "changes", "readers", "words"), UNUSABLE)
def test_values_that_nothing_can_be_made_of_are_named(target_copy, file, changes, readers, words):
    edited(target_copy / file, **changes)
    for reader in readers:
        with refused(str(target_copy), words):
            READERS[reader](target_copy)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("reader", READERS)
def test_a_named_pipe_is_refused_and_not_waited_for(target_copy, reader, name):
    (target_copy / name).unlink()
    os.mkfifo(target_copy / name)
    if reader == "facts":  # None: the loading that follows says why
        assert target_facts(target_copy) is None
    else:
        with refused(name):
            READERS[reader](target_copy)


@pytest.mark.parametrize("cut", [0, 3, 8, 20, 24, 100])
@pytest.mark.parametrize("begin", [b"GGUF\3\0\0\0", b"GGUF\3\0\0\0\xff\xff\xff\x7f", b""])
def test_a_gguf_file_that_is_cut_or_lies_is_named(tmp_path, cut, begin):
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    file.write_bytes((begin + b"\xff" * 200)[:cut])
    for read in (load_config, load_tokenizer, READERS["model"]):
        with refused(str(file)):
            read(file)


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        (None, "9 tensors"),
        (20_000, "num_hidden_layers 20000"),
        (92, "'num_hidden_layers' 92"),
        (3, "'hidden_size' 10000000"),
    ],
)
def test_a_gguf_file_that_names_more_than_it_holds_is_refused(tmp_path, blocks, words):
    file = tmp_path / "model.gguf"
    model = TARGETS["dense"]()
    if blocks == model.config.num_hidden_layers:
        model.config.hidden_size = 10**7
    model.config.num_hidden_layers = blocks or model.config.num_hidden_layers + 1
    written_as_gguf(model, file)
    with refused(str(file), words):
        READERS["model"](file)


REFUSED_LATER = ("{% break %}", "{{ cycler() }}")
"""What jinja parses, and Python or jinja refuses as it is run."""


UNPARSED = ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if %}", "{% for x in")
ENDLESS = "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"
MESSAGES = [{"role": "user", "content": "hello"}]


def with_template(target_copy, template):
    edited(target_copy / "tokenizer_config.json", chat_template=template)
    for file in target_copy.glob("*.jinja"):
        file.write_text(template)
    return load_chat_tokenizer(str(target_copy))


@pytest.mark.parametrize("template", [*UNPARSED, *REFUSED_LATER, ENDLESS])
def test_a_template_that_cannot_be_used_is_named(target_copy, template):
    tokenizer = with_template(target_copy, template)
    with refused("template", str(target_copy)):
        render(tokenizer, MESSAGES)
    with refused("template", str(target_copy)):
        SpeculativeLM.from_pretrained(target_copy, drafter="prompt-lookup").chat(tokenizer).say(
            "hello"
        )


@pytest.mark.parametrize("template", UNPARSED)
def test_the_variables_of_a_template_that_cannot_be_parsed_are_refused(target_copy, template):
    with refused(str(target_copy)):
        variables_read(with_template(target_copy, template))


def test_a_template_may_be_text(target_copy):
    assert render(with_template(target_copy, "(" * 5000), MESSAGES) == "(" * 5000


ADAPTER = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
ELSEWHERE = {"base_model_name_or_path": "other/base"}


@pytest.fixture
def adapter(target_folder, tmp_path):
    """The folder of a LoRA adapter that names the model other/base."""
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(target_folder)
    peft.get_peft_model(model, peft.LoraConfig(**ADAPTER)).save_pretrained(tmp_path / "adapter")
    edited(tmp_path / "adapter" / "adapter_config.json", **ELSEWHERE)
    return tmp_path / "adapter"


@pytest.mark.parametrize("place", ["folder", "subfolder", "hub", "hub with a model", "gguf"])
def test_a_model_that_an_adapter_names_is_not_opened(place, hub, adapter, target_copy):
    options = {}
    source = adapter
    if place == "subfolder":
        source = adapter.parent
        options = {"subfolder": "adapter"}
    elif place == "gguf":
        pytest.importorskip("gguf")
        source = adapter / "model.gguf"
        source.write_bytes(b"GGUF")
    elif place != "folder":
        paths = [*adapter.iterdir(), *(target_copy.iterdir() if "model" in place else ())]
        hub.repos["me/target"] = {path.name: path.read_bytes() for path in paths}
        hub.commits["me/target"] = ["0" * 40]
        source = "me/target"
    asked = []
    hub.trouble = lambda handler: asked.append(handler.path) or False
    with refused("adapter 'other/base'"):
        load_model(source, torch.float32, "cpu", options=options)
    if Path(source).is_dir() and not options:
        with refused("adapter 'other/base'"):
            load_config(source)
    assert not any("other" in path for path in asked)


def test_adapters_that_x_lora_names_are_not_opened(hub, target_copy, adapter):
    shutil.copytree(adapter, target_copy, dirs_exist_ok=True)
    named = {"peft_type": "XLORA", "hidden_size": 32, "adapters": {"0": "other/adapter"}}
    edited(target_copy / "adapter_config.json", **named)
    asked = []
    hub.trouble = lambda handler: asked.append(handler.path) or False
    with refused("adapter 'other/adapter'"):
        Target.load(target_copy, torch.float32, "cpu")
    (target_copy / "adapter_config.json").unlink()
    target = Target.load(target_copy, torch.float32, "cpu")
    edited(adapter / "adapter_config.json", **named)
    with refused("'XLORA' LORA"):
        target.merge_adapter(adapter)
    assert not asked


def test_an_adapter_in_its_models_own_folder_is_loaded_with_it(target_copy, adapter):
    shutil.copytree(adapter, target_copy, dirs_exist_ok=True)
    assert "default" in Target.load(target_copy, torch.float32, "cpu").model.peft_config


@pytest.mark.parametrize("text", ["[1]", "{}", '{"adapters": 3}', "[" * 200_000, "\0"])
def test_a_broken_config_of_an_adapter_is_named(target_copy, adapter, text):
    (adapter / "adapter_config.json").write_text(text)
    with refused("target", str(adapter)):
        load_model(adapter, torch.float32, "cpu")
    with refused("adapter", str(adapter)):
        Target.load(target_copy, torch.float32, "cpu").merge_adapter(adapter)
