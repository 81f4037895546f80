"""Models of the API's answers about one run: summary, rounds, tasks, classes, accuracy, bytes.

They have the fields of ``summary.json``, of ``rounds.jsonl`` and of the commands with ``--json``;
`web.api.answers` says how to read them.
"""

from __future__ import annotations

from pydantic import Field

from fcil_server.web.api.answers import AnswerModel, BestStateAnswer, Fields, Moment, ParentAnswer

Row = list[float | None]


class BytesAnswer(AnswerModel):
    """Bytes of one direction; docs/bytes.md explains them."""

    tensor: int
    sealed: int
    application: int
    wire: int = Field(description="TCP payload, predicted exactly")
    wire_kernel: int = Field(description="TCP payload by the kernel's count; 0: it was not asked")
    retransmitted: int
    link: int
    true_wire: int = Field(description="the kernel's count, or the prediction where there is none")
    rest: int
    object_store: int = Field(description="parts from an object store, as clients report")


class BothWaysAnswer(AnswerModel):
    """Bytes up and down."""

    up: BytesAnswer
    down: BytesAnswer


class RunBytesAnswer(BothWaysAnswer):
    """Bytes of a run."""

    by_cause: dict[str, BothWaysAnswer]
    outside_run: BothWaysAnswer = Field(description="of the federation, of no run")


class EvaluationAnswer(AnswerModel):
    """Accuracies in percent; docs/methods/README.md has the measures."""

    tasks: int
    matrix: list[Row] = Field(description="row t, column i: task i's classes after task t")
    matrix_macro: list[Row]
    task_mean: Row
    sample_weighted: Row
    macro: Row
    faa: float | None
    faa_sample_weighted: float | None
    aia: float | None
    aia_sample_weighted: float | None
    forgetting: dict[str, float | None]
    forgetting_matched: dict[str, float | None]
    coverage: list[float]
    test_images: list[int]
    evaluators: list[int]


class TaskAnswer(AnswerModel):
    """A class increment."""

    task: int
    class_ids: list[int]
    classes: list[str]
    opened_at: Moment
    closed_at: Moment | None


class HeadlineAnswer(AnswerModel):
    """A run's accuracy, in percent."""

    faa: float | None = Field(description="final average accuracy")
    aia: float | None = Field(description="average incremental accuracy")
    forgetting: float | None = Field(description="in percentage points")
    accuracy_matrix: list[Row] | None
    best_state: BestStateAnswer | None
    evaluation: EvaluationAnswer | None = Field(description="on the clients' test images")
    central_evaluation: EvaluationAnswer | None = Field(description="on the server's")


class RunAnswer(HeadlineAnswer):
    """A run's results: the data of `fcil-server report --json`."""

    run: str
    run_status: str
    created_at: Moment
    parent: ParentAnswer | None
    method: str
    method_version: str
    hparams: Fields
    seed: int
    backbone: Fields
    tasks: list[TaskAnswer]
    rounds: int
    clients: dict[str, str] = Field(description="id -> name of those that took part")
    bytes: RunBytesAnswer
    budget: Fields | None
    start: Fields | None
    seconds: dict[str, float]
    final_state: Fields | None


class AccuracyAnswer(HeadlineAnswer):
    """A run's accuracy."""

    run: str


class TasksAnswer(AnswerModel):
    """A run's tasks."""

    run: str
    tasks: list[TaskAnswer]


class ByteSumsAnswer(AnswerModel):
    """A run's bytes."""

    run: str
    bytes: RunBytesAnswer


class ClassAnswer(AnswerModel):
    """A class name of a run."""

    id: int | None
    name: str
    task: int | None
    planned_task: int | None
    aliases: list[str]
    hidden: bool
    admitted: bool
    first_seen_by: str
    seen_at: Moment


class ClassesAnswer(AnswerModel):
    """A run's class names: `fcil-server classes ls --json`."""

    run: str
    classes: list[ClassAnswer]


class SilentAnswer(AnswerModel):
    """An asked client without an update."""

    client: str
    name: str
    answer: str
    reason: str


class ExcludedAnswer(AnswerModel):
    """A client whose update does not count."""

    client: str
    name: str
    reason: str


class StaleAnswer(AnswerModel):
    """A client whose update starts from an older state than the round does."""

    client: str
    name: str
    states: int = Field(description="how many states older")


class RoundRowAnswer(AnswerModel):
    """One round: its clients, its duration, its cost."""

    seq: int
    task: int
    kind: str
    round: int
    outcome: str = Field(description="open, done, short or skipped")
    closed_by: str
    reopened: int
    asked: int
    updates: int
    train_loss: float | None
    train_accuracy: float | None
    test_accuracy: float | None
    counted: int
    answers: list[SilentAnswer]
    excluded: list[ExcludedAnswer]
    stale: list[StaleAnswer]
    seconds: float
    wire_up: int
    wire_down: int
    wire_source: str = Field(description="kernel or predicted")
    object_store: int = Field(description="bytes of parts from an object store, as clients say")
    tensors_up: int
    tensors_down: int


class RoundsAnswer(AnswerModel):
    """A page of a run's rounds: `fcil-server rounds --json`."""

    run: str
    rounds: list[RoundRowAnswer]
    next: int = Field(description="`since` for the next page")


class RoundAnswer(AnswerModel):
    """One round in detail: its line of ``rounds.jsonl``."""

    seq: int
    task: int
    kind: str
    round: int
    outcome: str | None = Field(description="None while it is open")
    closed_by: str
    reopened: int
    opened_at: Moment
    closed_at: Moment | None
    base_state: int
    new_state: int | None
    asked: list[str]
    counted: list[str]
    excluded: dict[str, str] = Field(description="client -> reason")
    stale: dict[str, int] = Field(description="client -> how many states its start is older")
    silent: dict[str, dict[str, str]] = Field(description="client -> answer and reason")
    seconds: dict[str, float]
    bytes: BothWaysAnswer
    metrics: Fields
    test_accuracy: float | None
    training: Fields


class FileAnswer(AnswerModel):
    """A file of a run's results."""

    name: str
    bytes: int


class FilesAnswer(AnswerModel):
    """The files of a run's results."""

    run: str
    files: list[FileAnswer]
