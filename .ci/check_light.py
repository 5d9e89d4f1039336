"""Does the wheel decode without any extra? Run by the Python of an environment that has only the
wheel."""

import importlib.metadata
import sys
import time

began = time.monotonic()
import torch  # noqa: E402
import transformers  # noqa: E402, F401
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

theirs = time.monotonic() - began
began = time.monotonic()
from headstart.inference import custom_generate  # noqa: E402

ours = time.monotonic() - began
distributions = {each.metadata["Name"].lower() for each in importlib.metadata.distributions()}
extra = sorted(
    distributions
    & {"accelerate", "datasets", "gguf", "jsonargparse", "matplotlib", "peft", "pyarrow"}
)
assert not extra, f"the wheel alone brings {', '.join(extra)}"
assert "accelerate" not in sys.modules

torch.manual_seed(0)
sizes = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
settings = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
prompt = torch.tensor([[3, 9, 27, 3, 9, 27, 3, 9]])
plain = model.generate(prompt, **settings)
method = custom_generate(drafter="prompt-lookup")
assert torch.equal(plain, model.generate(prompt, custom_generate=method, **settings))
print(
    f"without extras: decodes; imported in {ours:.1f} s after {theirs:.1f} s of torch and"
    " transformers"
)
