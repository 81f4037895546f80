"""``fcil-client split``: divide a data set between clients, as the papers do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fcil_protocol.errors import UsageError
from fcil_protocol.process.cli_options import FormatOption, JsonOption
from fcil_protocol.process.terminal import (
    Format,
    chosen,
    command,
    count_of,
    emit,
    errors,
    printable,
    say,
    say_at_times,
)

if TYPE_CHECKING:
    from fcil_client.data.partition_file import Partition
    from fcil_client.data.partition_make import Request


class SplitKind(StrEnum):
    """Schemes that divide images."""

    QUANTITY = "quantity"
    DIRICHLET = "dirichlet"
    HEPCO = "hepco"
    IID = "iid"


class Test(StrEnum):
    """Treatment of the test images."""

    DEALT = "dealt"
    NONE = "none"


# Which options belong to some kinds alone.
_OF_KIND = {
    "alpha": (SplitKind.QUANTITY,),
    "beta": (SplitKind.DIRICHLET,),
    "kappa": (SplitKind.HEPCO,),
    "gamma": (SplitKind.HEPCO,),
    "imbalance": (SplitKind.HEPCO,),
    "rounds": (SplitKind.HEPCO,),
    "min_images": (SplitKind.QUANTITY, SplitKind.DIRICHLET, SplitKind.IID),
    "categorical": (SplitKind.QUANTITY, SplitKind.DIRICHLET),
    "balance": (SplitKind.DIRICHLET,),
}


def _scheme(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Options of a scheme")


def _images(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Tasks, classes and images")


def split(
    data: Annotated[
        Path,
        typer.Option(
            help="FOLDER/<class>/<image>, FOLDER/train/<class>/..., a zip, or "
            "another form of docs/data.md."
        ),
    ],
    clients: Annotated[int, typer.Option(help="Number of clients.")],
    out: Annotated[Path, typer.Option(help="The partition file.")] = Path("partition.json"),
    partition: Annotated[
        SplitKind, typer.Option(help="Scheme that divides a task's images (docs/partitions.md).")
    ] = SplitKind.QUANTITY,
    alpha: Annotated[
        int | None,
        _scheme("quantity: classes of each client in a task [2]."),
    ] = None,
    beta: Annotated[float | None, _scheme("dirichlet: concentration [0.5].")] = None,
    kappa: Annotated[
        float | None,
        _scheme("hepco: share of a task's classes that a client sees [0.6]."),
    ] = None,
    gamma: Annotated[
        float | None,
        _scheme("hepco: share of a class's images that it sees [0.1]."),
    ] = None,
    imbalance: Annotated[
        float | None,
        _scheme("hepco: images of the last class over the first's [1]."),
    ] = None,
    rounds: Annotated[
        int | None,
        _scheme("hepco: rounds of a task that are drawn [10]."),
    ] = None,
    tasks: Annotated[
        int,
        _images("Number of tasks; 0: as --classes-per-task says, or 10."),
    ] = 0,
    classes_per_task: Annotated[
        int,
        _images("Classes per task; 0: all classes divided by --tasks."),
    ] = 0,
    order: Annotated[
        str,
        _images("Class order: pycil, natural, shuffled, or a file of names."),
    ] = "pycil",
    seed: Annotated[int, _images("Random seed.")] = 0,
    per_class: Annotated[
        int,
        _images("Use at most this many training images per class; 0: all."),
    ] = 0,
    test_per_class: Annotated[int, _images("The same for test images; 0: all.")] = 0,
    val_fraction: Annotated[
        float,
        _images("Share of the training images reserved for tuning."),
    ] = 0.0,
    test: Annotated[
        Test,
        _images("Divide test images between clients, or give them to none."),
    ] = Test.DEALT,
    test_fraction: Annotated[
        float,
        _images("Share held out for tests if the data has no test/ folder."),
    ] = 0.2,
    min_images: Annotated[
        int | None,
        _scheme("Minimum images of each task per client [1]."),
    ] = None,
    categorical: Annotated[
        bool | None,
        _scheme("Assign each image to a random client.", "--categorical"),
    ] = None,
    balance: Annotated[
        bool | None,
        _scheme("dirichlet: keep clients near an equal share.", "--balance"),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Plot which client holds what: FILE.svg or FILE.png.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Also write a folder for each client, for other devices.")
    ] = None,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Divide a data set between clients and tasks, and save the partition.

    The same seed gives the same file. It says how to start server and clients with it.
    """
    form = chosen(form, json_flag)
    given = {
        "alpha": alpha, "beta": beta, "kappa": kappa, "gamma": gamma, "imbalance": imbalance,
        "rounds": rounds, "min_images": min_images, "categorical": categorical, "balance": balance,
    }  # fmt: skip
    with errors(form):
        from fcil_client.data.partition_make import Request

        request = Request(
            kind=partition.value,
            clients=clients,
            seed=seed,
            order=_order(order),
            tasks=tasks,
            classes_per_task=classes_per_task,
            per_class=per_class,
            test_per_class=test_per_class,
            val_fraction=val_fraction,
            test=test is Test.DEALT,
            test_fraction=test_fraction,
            **_of_kind(partition, given),
        )
        made = _make(data, request, out, picture, export)
        row = partition_summary(made, out, picture, export)
        emit(row, form, lambda: show(made, row), rows=row["holdings"])
        say(f"{out} is written. The server needs its tasks, and each client its slot:")
        for line in _commands(data, out):
            say(f"  {line}")


def _commands(data: Path, out: Path) -> tuple[str, ...]:
    """Return the commands to start with a partition."""
    from fcil_client.state.home import client_command

    serve = command("fcil-server", "serve", "--partition", out)
    join = client_command("join", data, "--partition", str(out), "--slot", "K")
    swarm = client_command("swarm", data, "--partition", str(out))
    return (
        f"{serve}   # --until-done: exit after the last task",
        f"{join}   # each on its own",
        f"{swarm}           # or all in one process",
    )


def _of_kind(kind: SplitKind, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given, all of them of this kind."""
    chosen_ = {name: value for name, value in given.items() if value is not None}
    for name in chosen_:
        if kind not in _OF_KIND[name]:
            raise UsageError(
                f"--{name.replace('_', '-')} is for --partition "
                f"{' or '.join(_OF_KIND[name])}, and this one is {kind}.",
                action="Leave it out.",
            )
    return chosen_


def _order(order: str) -> str | tuple[str, ...]:
    """Return the name of a class order, or the names that a file lists."""
    from fcil_client.data.partition_draws import ORDERS
    from fcil_protocol.payloads.schema import normalise_class_name
    from fcil_protocol.storage.atomic_files import storage_errors

    path = Path(order)
    if order in ORDERS or not path.is_file():
        return order  # an unknown one is refused by who orders
    with storage_errors("read the class order", path):
        data = path.read_bytes()
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"the class order {path} is not text in UTF-8.") from error
    return tuple(normalise_class_name(line) for line in lines if line.strip())


def _make(
    data: Path, request: Request, out: Path, picture: Path | None, export: Path | None
) -> Partition:
    from fcil_adapters.images.decoding import open_source
    from fcil_client.data import partition_export, partition_file, partition_picture
    from fcil_client.data.partition_make import make
    from fcil_client.data.partition_source import SharedData
    from fcil_client.state.home import find_data

    if picture is not None:
        partition_picture.check_target(picture)
    if export is not None:
        partition_export.check_target(export, data)
    with closing(open_source(find_data(str(data)))) as source:
        say(f"scanning {data}")
        listing = source.listing()
        for fault in listing.faults:
            say(f"warning: {fault}")
        made = make(listing, request, say_at_times("drawing: {} of {} tasks".format))
        _keep(out, made)
        partition_file.save(out, made)
        if picture is not None:
            partition_picture.write(picture, made)
        if export is not None:
            parts = SharedData(source, made)
            partition_export.export(parts, export, say_at_times("writing: {} of {} clients".format))
    return made


def _keep(out: Path, made: Partition) -> None:
    """Refuse to overwrite anything but this partition: clients may be using another."""
    from fcil_client.data import partition_file
    from fcil_protocol.errors import CorruptFile, DataError

    if not out.exists():
        return
    try:
        if partition_file.load(out).digest == made.digest:
            return
        found = "already holds another partition, and clients may have joined with it"
    except (CorruptFile, DataError):
        found = "already exists and is not a complete partition"
    raise UsageError(
        f"{out} {found}.",
        action="Give this one another name: --out FILE, or remove the other.",
    )


def partition_summary(
    made: Partition, out: Path, picture: Path | None, export: Path | None
) -> dict[str, Any]:
    """Return a summary of a partition as plain data."""
    return {
        "file": str(out),
        "digest": made.digest,
        "kind": made.kind,
        "parameters": made.parameters,
        "order": made.order,
        "seed": made.seed,
        "clients": made.clients,
        "tasks": [list(task) for task in made.tasks],
        "images": {
            side: sum(map(len, by_class.values())) for side, by_class in made.images.items()
        },
        "notes": list(made.notes),
        "holdings": [_holding(made, slot) for slot in range(made.clients)],
        "picture": str(picture) if picture else None,
        "export": str(export) if export else None,
    }


def _holding(made: Partition, slot: int) -> dict[str, Any]:
    counts = made.counts(slot)
    return {
        "slot": slot,
        "classes": len(counts),
        "train": sum(counts.values()),
        "select": len(made.select(slot)),
        "test": len(made.test(slot)),
        "tasks": [sum(counts.get(name, 0) for name in task) for task in made.tasks],
    }


MOST_ROWS = 24  # clients that the table shows


def show(made: Partition, row: dict[str, Any]) -> None:
    """Print the number of images per client."""
    from statistics import median

    from fcil_client.data.partition_picture import describe

    images, holdings = row["images"], row["holdings"]
    typer.echo(
        f"{describe(made)}: {count_of(made.clients, 'client')}, "
        f"{count_of(len(made.tasks), 'task')} of "
        f"{_span([len(task) for task in made.tasks])} classes, order {made.order}, seed {made.seed}"
    )
    over = ", drawn again for every round; here all rounds together" if made.redraws else ""
    typer.echo(f"{images['train']} train images{over}")
    tuning = f"{images['select']} for tuning, " if images["select"] else ""
    tests = f"{images['test']} test images, divided evenly" if images["test"] else "no test images"
    typer.echo(f"{tuning}{tests}")
    for note in made.notes:
        typer.echo(f"note: {printable(note)}")
    typer.echo("")
    shown = holdings if len(holdings) <= MOST_ROWS else holdings[: MOST_ROWS - 4]
    _show_table(shown, len(made.tasks))
    if len(shown) < len(holdings):
        typer.echo(f"... and {len(holdings) - len(shown)} more (--format json has all)")
    sizes, held = [h["train"] for h in holdings], [h["classes"] for h in holdings]
    owners = [
        sum(name in made.counts(slot) for slot in range(made.clients))
        for task in made.tasks
        for name in task
    ]
    typer.echo("")
    typer.echo(
        f"A client has {_span(sizes)} train images (median {median(sizes):g}) of {_span(held)} "
        f"classes; a class is held by {_span(owners)} clients."
    )
    for what in ("picture", "export"):
        if row[what]:
            typer.echo(f"{what:8} {row[what]}")


def _show_table(holdings: list[dict[str, Any]], tasks: int) -> None:
    from fcil_protocol.process.tables import Column, console, show_table

    def images_of(task: int) -> Callable[[dict[str, Any]], str]:
        return lambda row: str(row["tasks"][task])

    columns = [Column(name, right=True) for name in ("slot", "classes", "train", "test")]
    columns += [Column(f"t{n}", images_of(n), right=True) for n in range(tasks)]
    show_table(console(), holdings, columns)


def _span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"
