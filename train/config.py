"""Every option of training and of making conversations, its default and its unit.

A YAML file sets them and the command line overrides them with dots (`--optim.lr 1e-3`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..files import text_shards
from ..options import (
    CommandOptions,
    Dtype,
    TakesOldNames,
    by_new_names,
    check_type,
    did_you_mean,
    limited,
    template_variables,
)
from ..rows import as_files


@dataclass(frozen=True)
class SelfMadeConfig(CommandOptions):
    """Conversations that the model generates."""

    required = ("target", "output")
    most_used = ("target", "output", "prompts", "head", "conversations")

    target: str = ""
    """The model: a folder, a Hub id, a GGUF file, or package:NAME for the GGUF file of a Python
    package."""
    output: str = ""
    """JSONL file to write; started again with the same options, the command resumes where it
    stopped."""
    prompts: str | None = None
    """JSONL file of prompts to answer, each at its own `temperature` and with its `follow_up` as
    one more turn if the row has them. Every turn of a conversation is answered anew, and its own
    answers are left out. Null lets the model generate the prompts too."""
    head: str | None = None
    """A draft head's checkpoint folder or Hub id, which makes the model generate faster."""
    allow_adapter: bool = False
    """Merge the LoRA adapter that the head brings, if it brings one, into the model, which then
    writes different text."""
    conversations: int = limited(1000, minimum=1)
    """Number of conversations; at most one for each given prompt."""
    batch_size: int = limited(16, minimum=1)
    """Conversations generated at the same time; a finished one makes room for the next."""
    dtype: Dtype = "fastest"
    """Data type of the model's weights; fastest takes the fastest one here that is as exact as the
    checkpoint's own, auto the checkpoint's own."""
    temperature: float = limited(0.8, minimum=0)
    """Sampling temperature of answers; 0 for greedy decoding."""
    max_new_tokens: int = limited(256, minimum=1)
    """Longest answer, in tokens."""
    thinking: bool | None = None
    """Given to the chat template as enable_thinking; null leaves it to the template. Training needs
    the same."""
    template_kwargs: dict[str, Any] | None = None
    """Further variables for the chat template, such as {reasoning_effort: high} or {thinking:
    true}; null for none. Training needs the same."""
    bad_rows: Literal["skip", "refuse"] = "skip"
    """Whether prompts that cannot be answered are left out, named and written to
    OUTPUT.rejected.jsonl, or end the command: rows without a message of the user, refused by the
    chat template, or too long for the model."""
    bad_rows_limit: float | None = limited(None, minimum=0, maximum=1)
    """Maximum share of prompts to skip; more end the command. Null for 1 %, or ten prompts where
    that is at most a tenth of all."""
    unfinished: Literal["keep", "drop"] = "keep"
    """Whether answers are kept that were cut off after `max_new_tokens`; training does not learn
    their end."""
    prompt_temperature: float = limited(1.0, above=0)
    """Sampling temperature of generated prompts."""
    prompt_min_p: float = limited(0.05, minimum=0, maximum=1)
    """Tokens less likely than this share of the best one are not sampled in generated prompts."""
    prompt_tokens: int = limited(128, minimum=1)
    """Longest generated prompt, in tokens; one that does not end by itself is dropped."""
    min_distinct: float = limited(0.3, minimum=0, maximum=1)
    """Texts in which a smaller share of the 4-grams is distinct are dropped as degenerate; 0 keeps
    all."""
    seed: int = 0
    """Seed of the sampling."""

    def __post_init__(self) -> None:
        rows: Any = self.prompts
        if rows and not isinstance(rows, str):
            # The dataclass is frozen: this is its constructor, which may still set its fields.
            object.__setattr__(self, "prompts", as_files(rows)[0])
        super().__post_init__()
        # Called for its error: they may contradict each other.
        template_variables(self.thinking, self.template_kwargs)


def head_options(config: TrainConfig) -> tuple[str, dict[str, Any]]:
    """Return the name of the config's head and that head's own options."""
    options = {name: value for name, value in config.head.items() if name != "type"}
    return config.head["type"], options


@dataclass(frozen=True)
class DataConfig:
    """Sources of conversations, their division and their truncation."""

    sources: list[str] = field(default_factory=list)
    """JSONL, JSON (.gz, .zst, .bz2, .xz) or Parquet files, patterns (data/*.jsonl), folders, or Hub
    data sets (`NAME[@REVISION][:[CONFIG:]SPLIT]`) of conversations: `messages`, ShareGPT's
    `conversations`, `prompt` and `completion`, or tokens (`input_ids` and `loss_mask`). With
    features.mode stored or cached, the default is the texts that features.folder holds with their
    states."""
    max_length: int = limited(1024, minimum=3)
    """Tokens after which a conversation is truncated."""
    held_out: float = limited(0.02, above=0, below=1)
    """Share of the conversations that is held out from training, for evaluation."""
    held_out_limit: int | None = limited(1000, minimum=1)
    """Conversations that are held out at most; null for no limit."""
    max_conversations: int | None = limited(None, minimum=1)
    """Use only this many, the first ones; null for all."""
    thinking: bool | None = None
    """Given to the chat template as enable_thinking; null leaves it to the template."""
    template_kwargs: dict[str, Any] | None = None
    """Further variables for the chat template, such as {reasoning_effort: high} or {thinking:
    true}; null for none."""
    bad_rows: Literal["skip", "refuse"] = "skip"
    """Whether rows that cannot be used are left out, named and written to rejected.jsonl, or end
    the run."""
    bad_rows_limit: float | None = limited(None, minimum=0, maximum=1)
    """Maximum share of rows to skip; more end the run. Null for 1 %, or ten rows where that is at
    most a tenth of all."""
    weights: list[float] | None = None
    """Passes of an epoch over each source: 2 for two, 0.5 for another half every time; null for one
    each."""
    pack: int | None = None
    """Tokens of a row that packs several conversations, none of which attends to another; null for
    one a row."""
    cache: str | None = None
    """Folder of the tokenized conversations; null for `data` in ~/.cache/headstart, or in
    $HEADSTART_CACHE."""
    num_proc: int | None = limited(None, minimum=1)
    """Processes that tokenize what the cache does not hold; null for the cores, or fewer for few
    conversations."""
    workers: int | None = limited(None, minimum=0)
    """Processes on each rank that read batches ahead, 0 for none; null for 2 beside an accelerator
    or with features.mode served, 0 on a CPU."""


@dataclass(frozen=True)
class FeaturesConfig:
    """Source of the target's states."""

    mode: Literal["online", "cached", "auto", "stored", "served"] = "online"
    """online computes them in every epoch; cached writes them to disk before the first step, auto
    while the first epoch computes them, if they take at most `limit` and there are more epochs or
    states in `folder` already. stored reads all of them from `folder`, and served fetches them from
    another source while the steps before are computed: both load no more of the target than its
    embedding, final norm and LM head."""
    folder: str | None = None
    """Folder of the cache, which `headstart features` fills; null for `features` in the run's
    folder."""
    format: Literal["bfloat16", "float32", "int8"] = "bfloat16"
    """How states are stored; int8 has a scale for each token and layer."""
    limit: float = limited(20.0, minimum=0)
    """GiB on disk that auto takes at most."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """Losses of the head and weights of depths; null for the default of its kind."""

    loss: dict[str, float] | None = None
    """Losses and their weights, such as {kl: 1.0, ce: 0.1}: ce, soft_ce, kl, reverse_kl, tv,
    lk_alpha, lk_lambda, and smooth_l1 (eagle) or confidence (dspark). reverse_kl, and tv alone,
    learn slowly from a new head; recipes of speculators and DSpark mix them with others."""
    depth_weights: Literal["decay", "d_pace"] | None = None
    """decay: decay to the power of the depth; d_pace: what a token adds to the expected number of
    accepted tokens (arXiv:2605.18810), as DFlash is trained by speculators and NVIDIA; it costs a
    short run of EAGLE-3 13 %."""
    decay: float | None = None
    """Loss weight of a depth relative to the one before, for depth_weights: decay."""
    target_top_k: int | None = None
    """Number of the target's most likely tokens to which its distribution is truncated; null for
    all that can be drafted."""
    d_pace_smoothing: float | None = None
    """Smoothing a of d_pace, from 0 to 1: a + (1 - a) q takes the place of the draft's probability
    q of a true token, so that deep tokens count early."""


@dataclass(frozen=True)
class OptimConfig:
    """An optimizer and its schedule: a linear warm-up, then a decay."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw; or muon for the matrices inside the head and AdamW for the rest."""
    lr: float = limited(1e-3, above=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's running means."""
    weight_decay: float = 0.0
    """Decoupled weight decay per step, times the learning rate."""
    warmup: float = limited(0.1, minimum=0, maximum=1)
    """Share of the steps over which the learning rate rises."""
    schedule: Literal["cosine", "linear", "polynomial", "inverse_sqrt", "constant_with_warmup"] = (
        "cosine"
    )
    """How the learning rate falls after that, by transformers' name."""
    clip: float = limited(1.0, above=0)
    """Gradient norm above which gradients are scaled down."""


@dataclass(frozen=True)
class LoopConfig:
    """Duration, batches, arithmetic, and how often to log, evaluate and save."""

    epochs: float = limited(2.0, above=0)
    """Passes over the training conversations."""
    max_steps: int | None = limited(None, minimum=1)
    """Stop after this many optimizer steps; null for all of `epochs`."""
    batch_size: int = limited(8, minimum=1)
    """Rows per optimizer step, over all processes and forwards; a row is a conversation, unless
    data.pack."""
    micro_batch: int | None = limited(None, minimum=1)
    """Rows per forward on each process; null for its whole share of a step."""
    batch_tokens: int | None = None
    """Tokens per optimizer step, padding included, over all processes and forwards, in rows of
    similar length; null for `batch_size` rows."""
    micro_tokens: int | None = limited(None, minimum=1)
    """With batch_tokens: tokens per forward on each process, about; null for its whole share of a
    step."""
    recompute: bool = False
    """Compute activations of the training-time test again in the backward pass instead of keeping
    them."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the head's arithmetic; its weights and the optimizer stay float32. auto takes
    bfloat16 where that is faster than float32; in float16 gradients would underflow."""
    save_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the heads in best/ and last/; checkpoints to resume from keep float32."""
    seed: int = 0
    """Seed of the data order and of all random draws."""
    log_every: int = limited(10, minimum=1)
    """Steps between two lines of losses."""
    eval_every: int = limited(200, minimum=0)
    """Steps between two evaluations of real acceptance; 0 for only the last."""
    save_every: int = limited(200, minimum=0)
    """Steps between two checkpoints to resume from; 0 for only the last."""
    save_minutes: float | None = limited(None, above=0)
    """Minutes of training between two checkpoints, besides those of `save_every`; null for none."""
    save_in_background: bool = True
    """Write these checkpoints from a copy in host memory, which is as large as one, while steps go
    on; DeepSpeed's are written before the next step."""
    keep: int = limited(2, minimum=1)
    """Checkpoints to resume from that are kept, the newest ones."""
    patience: int = limited(0, minimum=0)
    """Stop after this many evaluations in a row in which real acceptance was below the best
    although the held-out loss fell; 0 never stops early."""
    timeout: float = limited(30.0, above=0)
    """Minutes that a process waits for the others: at least as long as the slowest checkpoint or
    evaluation takes."""
    shard_over: Literal["machine", "all"] = "machine"
    """Processes over which FSDP2 shards the head, and target_placement shard the target: those of
    each machine, with a copy on every machine, or all."""
    profile: tuple[int, int] | None = None
    """First and last step, such as [10, 12], of which torch's profiler writes a trace to the run's
    folder `profile`."""
    tracker: Literal["none", "wandb", "tensorboard", "trackio"] = "none"
    """Experiment tracker that gets the numbers, through accelerate; `tracking` sets its names."""


TRACKERS = {
    "none": {"project", "entity", "group", "name", "tags"},
    "wandb": {"project", "entity", "group", "name", "tags"},
    "tensorboard": {"project"},
    "trackio": {"project", "group", "name"},
}
"""Which options of `TrackingConfig` a tracker knows; none takes all of them, so that a config may
switch it off."""


@dataclass(frozen=True)
class TrackingConfig:
    """Names under which `loop.tracker` shows a run, and what it gets besides numbers."""

    project: str | None = None
    """Project; null for WANDB_PROJECT with wandb, else headstart."""
    entity: str | None = None
    """Account or team of wandb; null for WANDB_ENTITY, else the account's own default."""
    group: str | None = None
    """Group of runs that are shown together; null for WANDB_RUN_GROUP, else none."""
    name: str | None = None
    """Displayed name of the run; null for WANDB_NAME with wandb, else its id: the output folder's
    name and a digest of its path."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run; those of WANDB_TAGS if there are none here."""
    upload: bool = True
    """Whether wandb gets the best head as an artifact, when the run ends or is stopped."""


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA on the target, trained jointly with the heads (Medusa-2)."""

    rank: int = limited(0, minimum=0)
    """Rank of the update of each matrix, 32 as published; 0 trains no adapter and leaves the target
    as it is."""
    alpha: int = limited(16, above=0)
    """The update is scaled by alpha / rank."""
    modules: list[str] = field(
        default_factory=lambda: [
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ]
    )
    """Linear layers of the target that get one, by the last part of their names."""
    heads_first: float = limited(0.5, minimum=0, maximum=1)
    """Share of the steps in which only the heads learn."""
    head_lr_ratio: float = limited(4.0, above=0)
    """The adapter's learning rate is optim.lr divided by this."""
    keep_base: float = limited(1.0, minimum=0)
    """Weight of the KL term that holds the adapted model to the original, relative to the heads'
    loss."""


@dataclass(frozen=True)
class EvalConfig(metaclass=TakesOldNames):
    """Real acceptance on held-out conversations, through the decoder itself."""

    prompts: int = limited(16, minimum=1)
    """Held-out prompts that are answered with the head."""
    max_new_tokens: int = limited(64, minimum=2)  # the first is the prefill's
    """Tokens of each answer."""
    conversations: int = limited(64, minimum=1)
    """Held-out conversations on which the accuracies behind the static tree are measured."""
    nodes: int = limited(12, minimum=2)
    """Size of the trees that are measured and of the one that is saved with the head, the root
    counted."""


@dataclass(frozen=True)
class TrainConfig(CommandOptions):
    """All that a run of `headstart train` depends on."""

    required = ("target", "output", "data.sources", "adapter.modules")
    most_used = ("target", "head", "data.sources", "output", "optim.lr")
    free_to_change: ClassVar[tuple[str, ...]] = ()
    """Options of a subclass that may differ when a run resumes."""

    target: str = ""
    """The frozen model: a folder, a Hub id, a GGUF file, or package:NAME for the GGUF file of a
    Python package."""
    output: str = ""
    """Folder of the run: checkpoints, the best head, the last head."""
    head: dict[str, Any] = field(default_factory=lambda: {"type": "eagle3"})
    """`type` (eagle3, eagle, medusa, hydra, hydra++, mtp, dflash or dspark) and that head's
    own options, which the page of heads lists; a name alone is the type."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """Losses and the weights of depths."""
    dtype: Dtype = "fastest"
    """Dtype of the frozen model's weights; fastest takes the checkpoint's own, or float32 where
    that is faster, auto the checkpoint's own."""
    target_placement: Literal["whole", "shard", "spread"] = "whole"
    """whole on every process; shard: each of its blocks sharded over the processes; spread: for one
    process, its blocks on one device after the other."""
    target_attention: str | None = None
    """The target's attention by transformers' name (attn_implementation): sdpa, flash_attention_2,
    flex_attention ...; null leaves it to transformers."""
    target_quantization: dict[str, Any] | None = None
    """The target's weights packed as they are loaded: transformers' quantization_config as a
    mapping, such as {load_in_4bit: true} or {quant_method: torchao, quant_type: ...}; null leaves
    them as they are."""
    init_from: str | None = None
    """A head's checkpoint whose weights training starts from, at step 0, or mtp for the MTP head in
    the target's own checkpoint; null for a new head. Its draft vocabulary gives way to the most
    frequent tokens of the new data, and may be given another size."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    """LoRA on the target, trained jointly with the head (Medusa-2)."""
    target_revision: str | None = None
    """Revision of the target's Hub id."""
    plan: str | None = None
    """Do not train, but print what the run needs under a launch: one, ddp:8, zero1:8, zero2:8,
    fsdp2:8 (with the number of processes)."""
    data: DataConfig = field(default_factory=DataConfig)
    """Conversations."""
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    """The target's states."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer and schedule."""
    loop: LoopConfig = field(default_factory=LoopConfig)
    """Duration, batches, precision, checkpoints."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation while training."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Names for the tracker."""

    def __post_init__(self) -> None:
        self._take_short_forms()
        self._take_stored_texts()
        super().__post_init__()  # what is required, types and limits
        data = self.data
        features = self.features
        optim = self.optim
        loop = self.loop
        adapter = self.adapter
        # What one option allows another, before anything is loaded.
        if "type" not in self.head:
            raise ValueError(
                "option 'head.type' is required: a name in the HEADS table, such as eagle3"
            )
        if data.weights is not None and (
            len(data.weights) != len(data.sources) or min(data.weights) <= 0
        ):
            raise ValueError(
                f"data.weights needs a number above 0 for each of the {len(data.sources)}"
                f" data.sources, not {data.weights}"
            )
        # Called for its error: they may contradict each other.
        template_variables(data.thinking, data.template_kwargs)
        if data.pack is not None and data.pack < data.max_length:
            raise ValueError(
                f"data.pack must hold the longest conversation, data.max_length {data.max_length},"
                f" not {data.pack}"
            )
        if loop.batch_tokens is not None and (
            data.pack is not None or loop.micro_batch is not None
        ):
            raise ValueError(
                "loop.batch_tokens counts tokens and takes neither loop.micro_batch, which counts"
                " rows (choose loop.micro_tokens), nor data.pack, whose rows have a number of"
                " tokens already (choose loop.batch_size)"
            )
        if loop.batch_tokens is None and loop.micro_tokens is not None:
            raise ValueError(
                "loop.micro_tokens divides loop.batch_tokens, which is not given; choose"
                " loop.micro_batch"
            )
        if loop.batch_tokens is not None and loop.batch_tokens < data.max_length:
            raise ValueError(
                f"loop.batch_tokens must be at least {data.max_length}, not {loop.batch_tokens}"
            )
        if loop.profile is not None and not 1 <= loop.profile[0] <= loop.profile[1]:
            raise ValueError(
                "loop.profile takes the first and the last step, such as [10, 12], not"
                f" {loop.profile!r}"
            )
        for name in ("project", "entity", "group", "name", "tags"):
            if getattr(self.tracking, name) and name not in TRACKERS[loop.tracker]:
                able = ", ".join(tracker for tracker, known in TRACKERS.items() if name in known)
                raise ValueError(
                    f"tracking.{name} is {getattr(self.tracking, name)!r}, which {loop.tracker}"
                    f" does not know; remove it, or choose loop.tracker {able}"
                )
        if self.target_quantization is not None and not self.target_quantization:
            raise ValueError(
                "target_quantization needs a mapping such as {load_in_4bit: true}, or null, not {}"
            )
        if adapter.rank > 0 and (optim.name == "muon" or features.mode != "online"):
            raise ValueError(
                "an adapter changes the target's states, so it needs features.mode online, and"
                f" optim.name adamw, not {features.mode} and {optim.name}"
            )
        if loop.precision == "float32" and self.dtype not in ("fastest", "auto", "float32"):
            raise ValueError(
                f"loop.precision float32 needs dtype float32, not {self.dtype}: the"
                " head's arithmetic would otherwise run on rounded features"
            )

    def _take_short_forms(self) -> None:
        """Take what Python's callers may write shorter, as a file of options has it.

        A head by its type alone, groups as dicts, one source, and rows in the place of a source.
        """
        # The dataclass is frozen: this is its constructor, which may still set its fields.
        if isinstance(self.head, str):
            object.__setattr__(self, "head", {"type": self.head})
        for group in fields(self):
            value = getattr(self, group.name)
            kind = group.default_factory
            if isinstance(value, dict) and isinstance(kind, type) and is_dataclass(kind):
                value = by_new_names(value, f"{group.name}.")
                valid = [option.name for option in fields(kind)]
                for name in value.keys() - set(valid):
                    raise ValueError(
                        f"unknown option {group.name}.{name}{did_you_mean(name, valid)}"
                    )
                object.__setattr__(self, group.name, kind(**value))
        check_type("data", self.data, DataConfig)
        sources = as_files(self.data.sources)
        check_type("data.sources", sources, list[str])
        object.__setattr__(self, "data", replace(self.data, sources=sources))

    def _take_stored_texts(self) -> None:
        """Name a folder of texts with their states as the source of their tokens too.

        Their tokens stay in that folder: who removes it removes what people wrote.
        """
        folder = self.features.folder
        data = self.data
        stored = self.features.mode in ("stored", "cached")
        if not data.sources and folder is not None and stored and text_shards(folder):
            data = replace(data, sources=[folder])
        recorded = [source for source in data.sources if text_shards(source)]
        if recorded and data.cache is None:
            data = replace(data, cache=str(Path(recorded[0]) / "tokens"))
        # The dataclass is frozen: this is its constructor, which may still set its fields.
        object.__setattr__(self, "data", data)
