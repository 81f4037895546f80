"""The sections of a federation's TOML: every key with its type, default and meaning."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fcil_adapters.contract.averaging import AveragingRule
from fcil_adapters.contract.backbone_info import MOST_PIXELS
from fcil_adapters.contract.half_precision import WEIGHTS, read_half
from fcil_protocol.messages.messages import PrivacyTerms
from fcil_server.federation.addresses import MOST_INTAKE, TlsFiles, split_address


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class FederationSection(Section):
    """Name and addresses of the federation."""

    name: str = Field("federation", max_length=128, description="shown to clients and in reports")
    listen: str = Field("127.0.0.1:7710", description="address the server binds, HOST:PORT")
    advertise: list[str] = Field(
        default_factory=list,
        description="addresses that clients should use; empty: the listen address",
    )
    heartbeat_s: float = Field(
        10.0, ge=0.25, description="seconds of silence before a peer is probed"
    )
    intake: int = Field(
        0,
        ge=0,
        le=MOST_INTAKE,
        description="processes that hold the clients' connections (docs/sizing.md); 0: the server "
        "itself does",
    )
    ids: Literal["random", "named"] = Field(
        "random",
        description="ids of new clients: random, or derived from their names, so that repeating "
        "an experiment with the same names gives the same numbers (docs/lab.md); "
        "relays and networks can guess the name behind a named id",
    )
    metrics: str = Field(
        "",
        description="address of the Prometheus metrics, such as 127.0.0.1:9464 "
        "(docs/metrics.md); empty: off",
    )
    metrics_cert: str = Field(
        "", description="PEM certificate, required for an address beyond loopback"
    )
    metrics_key: str = Field("", description="PEM key of the certificate")
    metrics_clients: int = Field(
        0, ge=0, le=1000, description="number of clients that get metrics of their own, by name"
    )

    page: str = Field(
        "",
        description="address of the live dashboard, such as 127.0.0.1:7780 (docs/page.md); "
        "empty: off",
    )
    page_cert: str = Field(
        "", description="PEM certificate, required for an address beyond loopback"
    )
    page_key: str = Field("", description="PEM key of the certificate")
    page_read_only: bool = Field(False, description="the dashboard has no controls")
    page_metrics: bool = Field(
        False,
        description="also serve /metrics on the dashboard's address, to anyone who can reach it",
    )
    page_health: bool = Field(
        True,
        description="also serve /healthz on the dashboard's address, to anyone who can reach it",
    )
    page_beside: list[str] = Field(
        default_factory=list,
        description="directories of other federations or runs that the dashboard can compare with",
    )

    api: str = Field(
        "",
        description="address of the HTTP API, such as 127.0.0.1:7790 (docs/api.md); empty: off",
    )
    api_cert: str = Field(
        "", description="PEM certificate, required for an address beyond loopback"
    )
    api_key: str = Field("", description="PEM key of the certificate")

    @property
    def metrics_certificate(self) -> TlsFiles:
        """The certificate of the metrics listener."""
        return TlsFiles(self.metrics_cert, self.metrics_key)

    @property
    def page_certificate(self) -> TlsFiles:
        """The certificate of the dashboard's listener."""
        return TlsFiles(self.page_cert, self.page_key)

    @property
    def api_certificate(self) -> TlsFiles:
        """The certificate of the API's listener."""
        return TlsFiles(self.api_cert, self.api_key)

    def bound(self, port: int = 0) -> str:
        """Return the address that the server binds.

        Args:
            port: the port that the server listens on; 0: the port of ``listen``.
        """
        host, listed = split_address(self.listen)
        shown = f"[{host}]" if ":" in host else host
        return f"{shown}:{port or listed}"

    def told(self, port: int = 0) -> list[str]:
        """Return the addresses that the server gives its clients; ``port`` as in `bound`."""
        return self.advertise or [self.bound(port)]

    def describe_doors(self, port: int) -> str:
        """Describe where the server listens, and which other addresses it gives its clients."""
        own, given = self.bound(port), self.told(port)
        return own if given == [own] else f"{own}; advertised as {', '.join(given)}"


class RunSection(Section):
    """Backbone, devices and evaluation of a run."""

    seed: int = Field(1993, ge=0, lt=2**63, description="seed of all randomness in the run")
    backbone: str = Field("embedded", description="timm name of the frozen ViT, or 'embedded'")
    weights: str = Field(
        "", description="local safetensors file of the backbone's weights; empty: timm's hub"
    )
    image_size: int = Field(
        0,
        ge=0,
        le=MOST_PIXELS,
        description="side of the backbone's images in pixels, a multiple of its patch; the "
        "position embedding is resampled for another size than the model's own; 0: that",
    )
    init_from: str = Field(
        "",
        description="folder of a PEFT adapter whose LoRA a new run begins with (docs/export.md); "
        "empty: the LoRA is drawn",
    )
    device: str = Field("auto", description="the server's device: auto, cpu, cuda, cuda:N")
    threads: int = Field(0, ge=0, description="threads of the server's worker; 0: all cores")
    worker_idle_s: float = Field(
        600.0,
        gt=0,
        description="seconds without work before the server's worker ends and frees its memory",
    )
    work_timeout_s: float = Field(
        1800.0, ge=0, description="seconds without progress before the worker is ended; 0: never"
    )
    evaluate: bool = Field(True, description="clients evaluate the global model after each task")
    keep_updates: bool = Field(
        False,
        description="keep every counted update, so that a client can be forgotten exactly "
        "(docs/forget.md; methods without training on clients)",
    )
    central_test: str = Field(
        "",
        description="test images that the server evaluates on: a folder of at most 1.5 million "
        "files and folders, or as clients' --data",
    )
    central_test_every: int = Field(
        0,
        ge=0,
        description="the server evaluates after every this many rounds of a task too, for a curve "
        "of accuracy; each time costs a pass over `central_test`; 0: after tasks alone",
    )
    plots: bool = Field(
        True,
        description="draw plots when a run ends; false: only `fcil-server report` does",
    )

    @model_validator(mode="after")
    def _has_test_images(self) -> RunSection:
        if self.central_test_every and not self.central_test:
            raise ValueError("central_test_every needs test images on the server: set central_test")
        return self


class MethodSection(BaseModel):
    """The method by name; every other key is one of its options (checked by its manifest)."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)
    name: str = "pilora"

    @property
    def options(self) -> dict[str, Any]:
        """All keys except the name."""
        return dict(self.model_extra or {})


class TasksSection(Section):
    """Order in which classes arrive."""

    schedule: Literal["discovered", "listed"] = Field(
        "discovered",
        description="discovered: classes that clients bring; listed: the classes given here",
    )
    classes: list[list[str]] = Field(
        default_factory=list, description="listed: the class names of each task"
    )
    min_new_classes: int = Field(
        1, ge=1, description="discovered: number of new classes that opens a task"
    )
    max_wait_s: float = Field(
        3600.0, gt=0, description="discovered: seconds after which a task opens with fewer"
    )
    settle_s: float = Field(
        3.0, ge=0, description="discovered: seconds without a new name before a task opens"
    )
    admit: Literal["auto", "confirm"] = Field(
        "auto",
        description="discovered: admit new names to tasks automatically, or only when the "
        "operator confirms (fcil-server classes admit)",
    )


class RoundSection(Section):
    """Opening and closing of rounds."""

    rounds_per_task: int = Field(5, ge=1, description="training rounds in each task")
    mode: Literal["sync", "async"] = Field(
        "sync",
        description="sync: all updates of a round start from the same state; async: a client "
        "still at work when a round closes continues, and its update counts in a later "
        "round of the task (docs/asynchronous-rounds.md)",
    )
    max_staleness: int = Field(
        10,
        ge=1,
        description="async: most states between the one that an update starts from and that of "
        "the round that counts it",
    )
    clients_per_round: int = Field(
        0, ge=0, description="clients with images of the task asked in a round; 0: all"
    )
    take: int = Field(
        0,
        ge=0,
        description="close the round after this many updates; 0: wait for all asked clients",
    )
    min_clients: int = Field(2, ge=1, description="connected clients required to open a round")
    quorum: int = Field(0, ge=0, description="updates that complete a round; 0: min_clients")
    min_updates: int = Field(
        0,
        ge=0,
        description="with fewer updates the round changes nothing, no matter how many clients "
        "decline or are excluded; 0: the least allowed, which is 1, with "
        "privacy.noise_multiplier 2, with masks privacy.secure_min_clients",
    )
    deadline_s: float = Field(
        600.0, gt=0, description="seconds of server uptime before a round closes"
    )
    grace_s: float = Field(
        20.0, ge=0, description="seconds that an asked client may be disconnected"
    )
    on_short: Literal["reopen", "close"] = Field(
        "reopen", description="action when the deadline passes without a quorum"
    )
    max_reopens: int = Field(
        3, ge=0, description="number of reopenings before the round closes short"
    )
    retry_s: float = Field(
        30.0,
        ge=0,
        description="if all asked clients decline, or too many for min_updates: seconds before "
        "they are asked again, four times as long after each try, at most "
        "max_reopens times; 0: skip the round at once",
    )
    settle_s: float = Field(
        1.0,
        ge=0,
        description="once min_clients are connected, seconds to wait for others; also for images "
        "of a new listed task on connected clients",
    )
    on_no_holder: Literal["wait", "skip"] = Field(
        "wait",
        description="min_clients are connected, but fewer than min_updates of them have images "
        "of the task's classes: wait for such clients, or skip the round",
    )
    no_holder_s: float = Field(
        3600.0,
        ge=0,
        description="skip: seconds of server uptime without such a client before the round is "
        "skipped",
    )
    late_every_s: float = Field(
        600.0,
        ge=0,
        description='with method.late = "count", while the run waits for new classes: seconds of '
        "server uptime between two rounds of late images",
    )


class WireSection(Section):
    """Limits and precision on the wire."""

    max_payload_mb: float = Field(1024.0, gt=0, le=1e6, description="largest payload accepted, MB")
    window_mb: float = Field(
        8.0,
        ge=0.125,
        le=32,
        description="largest window of requested but not yet received data per link, MB; slow "
        "links get less",
    )
    budget_mb: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="byte budget per client and round, up and down together, MB; when a run "
        "begins the method drops what it must to fit; 0: no budget",
    )
    half: Literal["weights", "none"] | list[str] = Field(
        WEIGHTS,
        description='kinds of tensors sent in half precision, such as ["lora", "head"]; '
        '"weights": all that the method offers; "none"',
    )
    compact: bool = Field(
        True,
        description="send tensors' names and shapes deflated; false: admit clients too old to read "
        "them",
    )

    @field_validator("half", mode="before")
    @classmethod
    def _read_half(cls, value: object) -> object:
        return read_half(value)  # one sentence; the types would give two

    @property
    def credit(self) -> int:
        """The largest window in bytes."""
        return int(self.window_mb * 2**20)


class PartsSection(Section):
    """The source of large parts of broadcasts."""

    store: str = Field(
        "",
        description="object store for sealed parts of 1 MiB and more, such as "
        "s3://bucket/folder, gs://, az:// or file:///folder (docs/object-store.md); empty: the "
        "server sends them itself",
    )
    url: str = Field(
        "",
        description="address under which clients read the store, such as a web server's or a "
        "cache's; empty: addresses that the store signs",
    )
    url_hours: float = Field(
        6.0, ge=0.1, le=168, description="hours for which a signed address is valid"
    )


# Of the noise multiplier and the clip, where they are not 0. A statistic leaves in float32, which
# rounds away what is smaller than 6e-8 of the largest influence of an image: less noise would be
# none. With more, epsilon is 0 after any number of rounds. Within them, noise on products, z C^2,
# stays in float32, and the accountant's z^2 and z^-2 stay far from the ends of float64.
LEAST_NOISE, MOST_NOISE = 1e-6, 1e6


class PrivacySection(Section):
    """Protection of single images."""

    evaluate_min_count: int = Field(
        1, ge=1, description="a client withholds the accuracy of a class with fewer test images"
    )
    share_names: bool = Field(
        False, description="show clients the names of classes that they do not hold"
    )
    min_count: int = Field(
        1,
        ge=1,
        description="a client excludes classes with fewer images: it neither announces, trains "
        "nor sends them; training and test images are counted each by themselves",
    )
    noise_multiplier: float = Field(
        0.0,
        ge=0,
        description="noise on statistics of images, as a multiple of one image's largest "
        "influence (docs/privacy.md), 1e-6 to 1e6; 0: none",
    )
    clip: float = Field(
        0.0,
        ge=0,
        description="with noise: each image's feature is clipped to this length, 1e-6 to 1e6",
    )
    delta: float = Field(
        1e-5, gt=0, lt=1, description="with noise: the delta for which clients state epsilon"
    )
    max_epsilon: float = Field(
        0.0, ge=0, description="with noise: clients decline rounds beyond this epsilon; 0: no limit"
    )
    partial: bool = Field(
        False,
        description="allow noise even if the method also sends trained tensors without noise",
    )
    secure: Literal["off", "masks"] = Field(
        "off",
        description="masks: the server learns the sum of a round's updates and no single one "
        "(docs/secure-aggregation.md)",
    )
    secure_threshold: float = Field(
        0.6,
        ge=0.5,
        le=1,
        description="with masks: clients open a sum only if this share of those that sent shares "
        "is in it",
    )
    secure_min_clients: int = Field(
        3, ge=3, description="with masks: clients open no sum of fewer clients"
    )
    relay_sums: bool = Field(
        False,
        description="a relay that was started with --sums opens its clients' updates and sends one "
        "sum of them (docs/relay.md)",
    )

    @property
    def terms(self) -> PrivacyTerms:
        """The terms that clients receive."""
        return PrivacyTerms(**self.model_dump(include=set(PrivacyTerms.model_fields)))


class TrustSection(Section):
    """Limits of the trust in any single client."""

    max_weight_share: float = Field(
        0.5, gt=0, le=1, description="cap on one client's weight, never below 1/K"
    )
    max_classes_per_client: int = Field(
        1000, ge=1, description="class names that one client may announce"
    )
    outlier_factor: float = Field(
        6.0,
        ge=0,
        description="exclude an update whose values lie this many spreads above the median of "
        "the round's updates (docs/lying-clients.md); 0: exclude none",
    )
    outlier_min_clients: int = Field(
        5, ge=3, description="updates required in a round before outliers are excluded"
    )
    averaging: AveragingRule = Field(
        "mean",
        description="rule that combines the clients' tensors; the method must offer it",
    )
    trim: float = Field(
        0.2,
        gt=0,
        lt=0.5,
        description="trimmed_mean: share of the weight dropped at each end; also the cap on one "
        "client's weight in trimmed_mean and median, never below 1/K",
    )
    clip: float = Field(
        2.0,
        ge=1,
        description="clip: steps from the round's start are cut to this multiple of their median "
        "length",
    )


class StorageSection(Section):
    """Data kept on disk."""

    keep_states: int = Field(
        3, ge=1, description="newest states to keep, besides one per task and the best tested one"
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_segment_mb(cls, fields: Any) -> Any:
        """Pass over a key that files have from before a round's updates were one file."""
        if isinstance(fields, dict):
            return {key: value for key, value in fields.items() if key != "segment_mb"}
        return fields


class NamedTables(BaseModel):
    """Base of the sections whose keys are names, each with a table of options."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)
    __pydantic_extra__: dict[str, dict[str, Any]] = Field(init=False)

    @property
    def options(self) -> dict[str, dict[str, Any]]:
        """Name -> its options, as given."""
        return dict(self.__pydantic_extra__)


class SinksSection(NamedTables):
    """Metric outputs besides a run's files: each key a sink with its options (docs/sinks.md)."""


class WebhooksSection(NamedTables):
    """Addresses that get the federation's news: each key a name with options (docs/api.md)."""
