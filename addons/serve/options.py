"""Server options of `headstart data`, `headstart train` and `headstart features`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from ...options import limited
from ...train.config import FeaturesConfig, SelfMadeConfig, TrainConfig

if TYPE_CHECKING:  # torch is not needed to read options
    from ...heads.base import TargetInfo
    from ...train.features.sources import OpenSource
    from .state_files import FileStates
    from .state_server import StateServer

Options = TypeVar("Options")


@dataclass(frozen=True)
class AnswersConfig(SelfMadeConfig):
    """Conversations that the model generates, or servers of it."""

    most_used = ("target", "output", "prompts", "server", "conversations")

    server: str | list[str] | None = None
    """URLs, separated by commas or as a list, of OpenAI-compatible servers of `target` (vLLM,
    SGLang: http://HOST:8000/v1) that answer the prompts, `batch_size` of them each at the same
    time; null for the model in this process."""
    tokenizer: str | None = None
    """Where the tokenizer of the servers' model is, if `target` is a name that only the servers
    know."""
    request_seconds: float = limited(600.0, minimum=1)
    """Longest time that a server may take for an answer, in seconds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.server is not None and (self.prompts is None or self.head is not None):
            raise ValueError(
                "a server answers given prompts in its own way: it needs prompts and takes no"
                f" head, not {self.prompts!r} and {self.head!r}"
            )
        if self.tokenizer is not None and self.server is None:
            raise ValueError(
                f"tokenizer {self.tokenizer!r} is that of a server's model; without server, leave"
                " it out"
            )


@dataclass(frozen=True)
class ServedFeaturesConfig(FeaturesConfig):
    """Source of the target's states, which may be a server."""

    from_server: str | None = None
    """Folder of states that a vLLM server made, in the files of the package speculators:
    hs_NUMBER.safetensors for conversation NUMBER of all data.sources. Mode stored reads each file
    when it is needed, those of held-out conversations too; mode cached copies them into the
    cache."""
    server: str | None = None
    """URL of a running vLLM of the target that gives states, such as http://HOST:8000/v1. Mode
    served trains on them; mode stored has `headstart features` write them to `folder`."""
    server_layers: list[int] = field(default_factory=list)
    """What the server or its files give of a token, in their order and in speculators' count: k is
    the input of block k, and the number of blocks what leaves the last one, such as [2, 16, 29, 32]
    for 32 blocks."""
    server_model: str | None = None
    """The server's name of the target; null for one that ends like `target`."""
    server_folder: str | None = None
    """The folder to which the server writes, as this machine sees it: of the server's answers only
    names of files count, and files are removed once they are read. Needed with `server`."""
    server_seconds: float = limited(300.0, above=0)
    """Longest time that the server may take for a sequence, in seconds, with restarts of it."""


@dataclass(frozen=True)
class ServedTrainConfig(TrainConfig):
    """All that a run of `headstart train` depends on."""

    free_to_change: ClassVar[tuple[str, ...]] = (
        "features.server",
        "features.server_folder",
        "features.server_seconds",
    )

    features: ServedFeaturesConfig = field(default_factory=ServedFeaturesConfig)
    """The target's states."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_server(self.features)


def check_server(features: ServedFeaturesConfig) -> None:
    """Refuse options of a server's states that do not go together."""
    # One source, with its layers.
    servers = {"features.from_server": features.from_server, "features.server": features.server}
    named = [name for name, value in servers.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} are two sources of the same states; choose one")
    if (not named) != (not features.server_layers):
        raise ValueError(
            "features.from_server or features.server, and features.server_layers, belong together, "
            f"not {features.from_server!r}, {features.server!r} and {features.server_layers}"
        )
    # Files are read or copied; a running server is trained on, or written to a folder.
    if features.from_server is not None and features.mode not in ("cached", "stored"):
        raise ValueError(
            f"features.from_server needs features.mode stored or cached, not {features.mode}"
        )
    if features.server is not None and features.mode not in ("served", "stored"):
        raise ValueError(
            f"features.server needs features.mode served or stored, not {features.mode}"
        )
    if features.mode == "served" and features.server is None:
        raise ValueError(
            "features.mode served needs features.server, the URL of a vLLM that gives states, and "
            "features.server_layers"
        )
    if features.server is not None and not features.server.startswith(("http://", "https://")):
        raise ValueError(
            f"features.server is a URL such as http://HOST:8000/v1, not {features.server!r}"
        )
    if features.server is not None and features.server_folder is None:
        raise ValueError(
            "features.server needs features.server_folder, the folder to which the server writes,"
            " as this machine sees it: its files are removed once they are read"
        )


def training_source(config: ServedTrainConfig) -> tuple[TrainConfig, OpenSource | None]:
    """Return the options of a run, and what opens its source of states.

    None if no server has them. With mode stored and `server`, `headstart features` has written the
    states to a folder.
    """
    features = config.features
    # Without a server the run's options are train's own: they resume runs of either kind.
    if features.from_server is None and features.server is None:
        features_alone = options_of(features, FeaturesConfig)
        return options_of(config, TrainConfig, features=features_alone), None
    if features.from_server is None and features.mode == "stored":
        return config, None
    return config, partial(open_server, features)


def options_of(config: object, kind: Callable[..., Options], **changes: object) -> Options:
    """Take the options of a class from those of a class with more."""
    values = {option.name: getattr(config, option.name) for option in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{**values, **changes})


def open_server(
    features: ServedFeaturesConfig, target: TargetInfo, layers: tuple[int, ...]
) -> FileStates | StateServer:
    """Open the states that a server wrote to files, or those of a running one.

    Raises:
        ValueError: no such folder or files, or layers that the server does not give.
    """
    from .state_files import FileStates, ServerLayers
    from .state_server import StateServer

    server_layers = ServerLayers.of(features.server_layers, layers, target)
    if features.from_server is not None:
        return FileStates(Path(features.from_server), server_layers)
    assert features.server is not None
    assert features.server_folder is not None
    return StateServer(
        features.server,
        server_layers,
        features.server_model,
        features.server_seconds,
        Path(features.server_folder),
    )
