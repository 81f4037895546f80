"""The sections of a federation's TOML: every key with its type, default and meaning."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fcil_adapters.contract.averaging import AveragingRule
from fcil_adapters.contract.half_precision import WEIGHTS, read_half
from fcil_protocol.messages.messages import PrivacyTerms
from fcil_server.federation.addresses import Certificate, split_address


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class FederationSection(Section):
    """Name and addresses of the federation."""

    name: str = Field("federation", max_length=128, description="shown to clients and in reports")
    listen: str = Field("127.0.0.1:7710", description="address the server binds, HOST:PORT")
    advertise: list[str] = Field(
        default_factory=list,
        description="addresses that clients are told; empty: the listen address",
    )
    heartbeat_s: float = Field(10.0, ge=0.25, description="silence before a peer is probed")
    ids: Literal["random", "named"] = Field(
        "random",
        description="new clients' ids: drawn, or derived from their names, so that an experiment "
        "made again with clients of the same names gives the same numbers (docs/lab.md); by a "
        "named id, relays and networks can guess the name",
    )
    metrics: str = Field(
        "",
        description="address at which figures are served to Prometheus, such as 127.0.0.1:9464 "
        "(docs/metrics.md); empty: they are not",
    )
    metrics_cert: str = Field(
        "", description="PEM file of the certificate that an address beyond loopback needs"
    )
    metrics_key: str = Field("", description="PEM file of its key")
    metrics_clients: int = Field(
        0, ge=0, le=1000, description="of so many clients figures are told apart, by name"
    )

    page: str = Field(
        "",
        description="address at which the live page is served, such as 127.0.0.1:7780 "
        "(docs/page.md); empty: it is not",
    )
    page_cert: str = Field(
        "", description="PEM file of the certificate that an address beyond loopback needs"
    )
    page_key: str = Field("", description="PEM file of its key")
    page_read_only: bool = Field(False, description="the page shows and changes nothing")
    page_metrics: bool = Field(
        False, description="the page's address serves /metrics, too, to everybody who reaches it"
    )
    page_health: bool = Field(
        True, description="the page's address serves /healthz, too, to everybody who reaches it"
    )
    page_beside: list[str] = Field(
        default_factory=list,
        description="other federations' or runs' directories that the page can compare with",
    )

    @property
    def metrics_certificate(self) -> Certificate:
        """The certificate of the metrics listener."""
        return Certificate(self.metrics_cert, self.metrics_key)

    @property
    def page_certificate(self) -> Certificate:
        """The certificate of the dashboard's listener."""
        return Certificate(self.page_cert, self.page_key)

    def told(self, port: int = 0) -> list[str]:
        """Return the addresses that the server gives its clients.

        Args:
            port: the port that the server listens on; 0: the port of ``listen``.
        """
        host, listed = split_address(self.listen)
        shown = f"[{host}]" if ":" in host else host
        return self.advertise or [f"{shown}:{port or listed}"]


class RunSection(Section):
    """Backbone, devices and evaluation of a run."""

    seed: int = Field(1993, ge=0, description="all randomness of the run derives from it")
    backbone: str = Field("embedded", description="timm name of the frozen ViT, or 'embedded'")
    weights: str = Field("", description="local safetensors file of its weights; empty: timm's hub")
    device: str = Field("auto", description="where the server computes: auto, cpu, cuda, cuda:N")
    threads: int = Field(0, ge=0, description="threads of the server's worker; 0: all cores")
    worker_idle_s: float = Field(600.0, gt=0, description="idle time after which it is freed")
    work_timeout_s: float = Field(
        1800.0, ge=0, description="time without progress after which it is ended; 0: never"
    )
    evaluate: bool = Field(True, description="clients evaluate the global model after each task")
    keep_updates: bool = Field(
        False,
        description="keep every counted update, so that a client can be forgotten exactly "
        "(docs/forget.md; methods without training on clients)",
    )
    central_test: str = Field("", description="folder of test images that the server evaluates on")
    plots: bool = Field(
        True,
        description="a run's end draws its pictures; false: only `fcil-server report` does",
    )


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
        "discovered", description="discovered: classes that clients bring; listed: as given here"
    )
    classes: list[list[str]] = Field(
        default_factory=list, description="listed: the class names of each task"
    )
    min_new_classes: int = Field(1, ge=1, description="discovered: a task opens with so many")
    max_wait_s: float = Field(
        3600.0, gt=0, description="discovered: after so long a task opens with fewer"
    )
    settle_s: float = Field(
        3.0, ge=0, description="discovered: quiet time after the last new name before opening"
    )
    admit: Literal["auto", "confirm"] = Field(
        "auto",
        description="discovered: new names enter tasks by themselves, or once an operator says so "
        "(fcil-server classes admit)",
    )


class RoundSection(Section):
    """Opening and closing of rounds."""

    rounds_per_task: int = Field(5, ge=1, description="train rounds in each task")
    clients_per_round: int = Field(0, ge=0, description="holders asked in a round; 0: all")
    take: int = Field(
        0,
        ge=0,
        description="updates after which a round closes, the first to come; 0: waits for all asked",
    )
    min_clients: int = Field(2, ge=1, description="connected clients before a round opens")
    quorum: int = Field(0, ge=0, description="updates that complete a round; 0: min_clients")
    min_updates: int = Field(
        0,
        ge=0,
        description="updates without which a round changes nothing, whoever declines or is left "
        "out; 0: 1, and 2 with privacy.noise_multiplier, which allows no fewer",
    )
    deadline_s: float = Field(600.0, gt=0, description="server uptime before a round closes")
    grace_s: float = Field(20.0, ge=0, description="how long an asked client may be away")
    on_short: Literal["reopen", "close"] = Field("reopen", description="deadline without quorum")
    max_reopens: int = Field(3, ge=0, description="then the round closes short")
    retry_s: float = Field(
        30.0,
        ge=0,
        description="all asked clients declined, or too many for min_updates: time before they "
        "are asked again, four times as long each further time, max_reopens times; 0: the round "
        "is skipped at once",
    )
    settle_s: float = Field(
        1.0,
        ge=0,
        description="once min_clients have come, how long to wait for others; also for images of a "
        "new listed task on those who are there",
    )
    on_no_holder: Literal["wait", "skip"] = Field(
        "wait",
        description="min_clients are connected and fewer than min_updates of them have images of "
        "the task's classes: wait for such clients, or skip the round",
    )
    no_holder_s: float = Field(
        3600.0, ge=0, description="skip: server uptime without such a client before the round is"
    )


class WireSection(Section):
    """Limits and precision on the wire."""

    max_payload_mb: float = Field(1024.0, gt=0, description="largest payload accepted, MB")
    window_mb: float = Field(
        8.0,
        ge=0.125,
        le=32,
        description="most that is asked of a link before it has come, MB; slow links get less",
    )
    budget_mb: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="most that one client may cost in one round, up and down together, MB; the "
        "method gives up what it must when a run begins; 0: no budget",
    )
    half: Literal["weights", "none"] | list[str] = Field(
        WEIGHTS,
        description="kinds of tensors that travel in half precision, such as "
        '["lora", "head"]; "weights": all that the method offers; "none"',
    )

    @field_validator("half", mode="before")
    @classmethod
    def _read_half(cls, value: object) -> object:
        return read_half(value)  # one sentence; the types would give two

    @property
    def credit(self) -> int:
        """The largest window in bytes."""
        return int(self.window_mb * 2**20)


class PrivacySection(Section):
    """Protection of single images."""

    evaluate_min_count: int = Field(
        1, ge=1, description="a client withholds a class's accuracy below so many test images"
    )
    share_names: bool = Field(False, description="clients see class names that they do not hold")
    min_count: int = Field(
        1,
        ge=1,
        description="a client leaves out classes of fewer images: unannounced, unlearned, unsent",
    )
    noise_multiplier: float = Field(
        0.0,
        ge=0,
        description="noise on statistics of images, as a multiple of what one image can move them "
        "(docs/privacy.md); 0: none",
    )
    clip: float = Field(
        0.0, ge=0, description="with noise: an image's feature is cut to this length"
    )
    delta: float = Field(
        1e-5, gt=0, lt=1, description="with noise: the delta for which clients state epsilon"
    )
    max_epsilon: float = Field(
        0.0, ge=0, description="with noise: a client declines rounds beyond this; 0: no limit"
    )
    partial: bool = Field(
        False,
        description="noise although the method also sends what it trains, without noise",
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
    max_classes_per_client: int = Field(1000, ge=1, description="class names one may announce")
    outlier_factor: float = Field(
        6.0,
        ge=0,
        description="an update whose values lie so many spreads of the round's updates above "
        "their median is excluded (docs/lying-clients.md); 0: none is",
    )
    outlier_min_clients: int = Field(
        5, ge=3, description="updates of a round from which on outliers are excluded"
    )
    averaging: AveragingRule = Field(
        "mean",
        description="how the clients' tensors become one; the method must offer the rule",
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
        description="clip: steps from the round's start are cut to so many times their median "
        "length",
    )


class StorageSection(Section):
    """Data kept on disk."""

    keep_states: int = Field(3, ge=1, description="newest states kept, besides one per task")
    segment_mb: int = Field(64, ge=1, description="size of a spool segment, MB")


class SinksSection(BaseModel):
    """Metric outputs besides a run's files: each key a sink with its options (docs/sinks.md)."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)
    __pydantic_extra__: dict[str, dict[str, Any]] = Field(init=False)

    @property
    def options(self) -> dict[str, dict[str, Any]]:
        """Sink -> its options, as given."""
        return dict(self.__pydantic_extra__)
