"""Make a partition from a listing of images and a request: tasks, subsets, owners."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np

from fcil_adapters.images.decoding import Listing
from fcil_client.data import partition_draws as draws
from fcil_client.data.file_names import is_text
from fcil_client.data.partition_draws import Draw
from fcil_client.data.partition_file import DividedData, Partition, listing_digest, with_digest
from fcil_protocol.errors import UsageError
from fcil_protocol.process.terminal import count_of

TEST_FRACTION = 0.2
MOST_BETA = 1e6  # as good as even; from 1e305 on, numpy's shares are NaN
Names = dict[str, tuple[str, ...]]  # class name -> names of its images
# Further streams besides those of the tasks; a fifth word is no padding, so none coincide.
_SUBSET, _HOLD_OUT, _VALIDATE, _DEAL = 1, 2, 3, 4


@dataclass(frozen=True)
class Request:
    """Options of a new partition; the defaults are those of docs/partitions.md, "Kinds".

    Attributes:
        kind: quantity, dirichlet, hepco or iid.
        clients: number of clients.
        seed: of every draw except the test images of data without test/.
        order: one of `partition_draws.ORDERS`, or the class names themselves.
        tasks, classes_per_task: see `partition_draws.make_tasks`.
        alpha: quantity: classes of a client in a task.
        beta: dirichlet: concentration.
        kappa, gamma, imbalance: hepco: shares of classes and of images; last class over first.
        rounds: hepco: number of rounds drawn per task.
        min_images: of each client and task (not hepco).
        categorical, balance: see `partition_draws.quantity` and `partition_draws.dirichlet`.
        per_class: train images of a class, drawn; 0: all.
        test_per_class: the same for the test images.
        val_fraction: share of the train images that is for tuning only.
        test: deal the test images over the clients; else no client has any.
        test_fraction: share kept for tests of data without test/.
    """

    kind: str = "quantity"
    clients: int = 10
    seed: int = 0
    order: str | tuple[str, ...] = "pycil"
    tasks: int = 0
    classes_per_task: int = 0
    alpha: int = 2
    beta: float = 0.5
    kappa: float = 0.6
    gamma: float = 0.1
    imbalance: float = 1.0
    rounds: int = 10
    min_images: int = 1
    categorical: bool = False
    balance: bool = False
    per_class: int = 0
    test_per_class: int = 0
    val_fraction: float = 0.0
    test: bool = True
    test_fraction: float = TEST_FRACTION

    def parameters(self) -> dict[str, int | float | str | bool]:
        """Return all inputs of the result, by name, besides seed, order and tasks."""
        of_kind = {
            "quantity": ("alpha", "min_images", "categorical"),
            "dirichlet": ("beta", "min_images", "categorical", "balance"),
            "hepco": ("kappa", "gamma", "imbalance", "rounds"),
            "iid": ("min_images",),
        }[self.kind]
        common = ("per_class", "test_per_class", "val_fraction", "test", "test_fraction")
        fields = asdict(self)
        return {name: fields[name] for name in (*of_kind, *common)}


def make(
    listing: Listing,
    request: Request,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Partition:
    """Divide a data set.

    Args:
        listing: images of the source.
        request: options.
        progress: receives the number of tasks done and in total.

    Raises:
        UsageError: it cannot be divided with these options; the sentence says why.
    """
    _check_request(request)
    notes: list[str] = []
    images = _sides(listing, request, notes)
    names = list(images["train"])
    order = draws.class_order(names, request.order, request.seed)
    tasks = draws.make_tasks(order, request.tasks, request.classes_per_task)
    used = [name for task in tasks for name in task]
    images = {
        side: {name: by_class[name] for name in used if by_class.get(name)}
        for side, by_class in images.items()
    }
    owners: dict[str, dict[str, tuple[int, ...]]] = {"train": {}}
    rounds = []
    for number, classes in enumerate(tasks):
        held = {name: images["train"][name] for name in classes}
        _check_task(request, number, held)
        if request.kind == "hepco":
            rounds.append(_rounds(request, number, held))
        else:
            owners["train"] |= _drawn(request, number, held, notes)
        progress(number + 1, len(tasks))
    if request.kind == "hepco":
        del owners["train"]
    for place, side in enumerate(("select", "test")):
        rng = _stream(request.seed, place, _DEAL)
        owners[side] = _owned(draws.even(), images[side], request.clients, rng)
    return with_digest(
        Partition.model_validate(
            {
                "kind": request.kind,
                "parameters": request.parameters(),
                "seed": request.seed,
                "order": request.order if isinstance(request.order, str) else "listed",
                "clients": request.clients,
                "tasks": tasks,
                "source": DividedData(digest=listing_digest(listing), images=len(listing.entries)),
                "notes": tuple(notes),
                "images": images,
                "owners": owners,
                "rounds": tuple(rounds),
            }
        )
    )


# --- sides of images -----------------------------------------------------------------------


def _sides(listing: Listing, request: Request, notes: list[str]) -> dict[str, Names]:
    """Return the images of each side, by class in natural order."""
    train, test = _layout(listing, notes)
    names = draws.natural_order(list(train))
    extra = sorted(test.keys() - train.keys())
    if extra:
        notes.append(f"left out, since they have only test images: {', '.join(extra)}")
    sides: dict[str, Names] = {"train": {}, "select": {}, "test": {}}
    for number, name in enumerate(names):
        learned, tested = train[name], test.get(name, [])
        if request.test and not test:
            rng = _stream(0, number, _HOLD_OUT)  # the same images for every seed
            tested, learned = _cut(learned, int(len(learned) * request.test_fraction), rng)
        if request.per_class and len(learned) < request.per_class:
            notes.append(f"class {name!r} has only {len(learned)} train images")
        learned = _some(learned, request.per_class, _stream(request.seed, number, _SUBSET))
        rng = _stream(request.seed, number, _VALIDATE)
        select, learned = _cut(learned, int(len(learned) * request.val_fraction), rng)
        if request.test:
            rng = _stream(request.seed, number, _SUBSET)
            sides["test"][name] = tuple(_some(tested, request.test_per_class, rng))
        sides["train"][name], sides["select"][name] = tuple(learned), tuple(select)
    return sides


def _layout(
    listing: Listing, notes: list[str]
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    train: dict[str, list[str]] = {}
    test: dict[str, list[str]] = {}
    named = [entry for entry in listing.entries if is_text(entry.name)]
    if len(named) < len(listing.entries):
        notes.append(
            f"left out, since their names are not UTF-8: {len(listing.entries) - len(named)}"
        )
    for entry in named:
        (test if entry.part == "test" else train).setdefault(entry.class_name, []).append(
            entry.name
        )
    if not train:
        raise UsageError("the data has only test images, so there is nothing to divide.")
    return train, test


def _some(names: list[str], most: int, rng: np.random.Generator) -> list[str]:
    """Return ``most`` of the names, drawn, in their order; 0: all."""
    return _cut(names, most, rng)[0] if most else names


def _cut(names: list[str], most: int, rng: np.random.Generator) -> tuple[list[str], list[str]]:
    """Draw ``most`` of the names; return them and the others, both in their order."""
    drawn = set(rng.permutation(len(names))[:most].tolist())
    return (
        [name for i, name in enumerate(names) if i in drawn],
        [name for i, name in enumerate(names) if i not in drawn],
    )


def _stream(seed: int, number: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng([seed, number, 0, 0, purpose])


# --- owners --------------------------------------------------------------------------------


def _draw(request: Request) -> Draw:
    if request.kind == "quantity":
        return draws.quantity(
            request.alpha, minimum=request.min_images, categorical=request.categorical
        )
    if request.kind == "dirichlet":
        return draws.dirichlet(
            request.beta,
            minimum=request.min_images,
            categorical=request.categorical,
            balance=request.balance,
        )
    return draws.even()


def _drawn(
    request: Request, task: int, held: Names, notes: list[str]
) -> dict[str, tuple[int, ...]]:
    rng = draws.task_stream(request.seed, task)
    owners = _owned(_draw(request), held, request.clients, rng)
    sizes = np.bincount(np.concatenate([*owners.values()]), minlength=request.clients)
    short = np.flatnonzero(sizes < request.min_images).tolist()
    if short:
        notes.append(
            f"task {task}: {len(short)} of {request.clients} clients have fewer than "
            f"{request.min_images} images after {draws.MAX_DRAWS} draws: slots "
            f"{', '.join(map(str, short[:10]))}{' and others' if len(short) > 10 else ''}"
        )
    return owners


def _owned(
    draw: Draw, held: Names, clients: int, rng: np.random.Generator
) -> dict[str, tuple[int, ...]]:
    owner = draw(_labels(held), clients, rng).tolist()
    sizes = np.cumsum([0, *(len(images) for images in held.values())]).tolist()
    return {
        name: tuple(owner[start : start + len(held[name])])
        for name, start in zip(held, sizes, strict=False)
    }


def _labels(held: Names) -> draws.I64:
    """Return each image's class index among those held, (N,)."""
    sizes = [len(images) for images in held.values()]
    return np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)


def _rounds(
    request: Request, task: int, held: Names
) -> tuple[tuple[dict[str, tuple[int, ...]], ...], ...]:
    labels, names = _labels(held), list(held)
    starts = np.searchsorted(labels, np.arange(len(names)))

    def choice(round_: int, slot: int) -> dict[str, tuple[int, ...]]:
        rng = draws.hepco_stream(request.seed, task, round_, slot)
        chosen = draws.hepco(
            labels, rng, kappa=request.kappa, gamma=request.gamma, beta=request.imbalance
        )
        return {names[c]: tuple((rows - starts[c]).tolist()) for c, rows in sorted(chosen.items())}

    return tuple(
        tuple(choice(round_, slot) for slot in range(request.clients))
        for round_ in range(request.rounds)
    )


# --- checks --------------------------------------------------------------------------------


def _check_request(request: Request) -> None:
    for fault, action in _wrong(request):
        raise UsageError(fault, action=action)


def _wrong(request: Request) -> Iterator[tuple[str, str]]:
    for name in ("clients", "rounds"):
        if getattr(request, name) < 1:
            yield f"{name} must be at least 1, got {getattr(request, name)}.", ""
    for name in ("seed", "tasks", "classes_per_task", "per_class", "test_per_class", "min_images"):
        if getattr(request, name) < 0:
            yield f"{name.replace('_', ' ')} must be at least 0, got {getattr(request, name)}.", ""
    bounds = {
        "beta": ("above 0 and at most 1e+06", 0 < request.beta <= MOST_BETA),
        "kappa": ("above 0 and at most 1", 0 < request.kappa <= 1),
        "gamma": ("above 0 and at most 1", 0 < request.gamma <= 1),
        "imbalance": ("above 0 and at most 1", 0 < request.imbalance <= 1),
        "val_fraction": ("at least 0 and below 1", 0 <= request.val_fraction < 1),
        "test_fraction": ("at least 0 and below 1", 0 <= request.test_fraction < 1),
    }
    for name, (words, fine) in bounds.items():
        if not fine:
            option = f"--{name.replace('_', '-')}"
            got = getattr(request, name)
            yield (
                f"{name.replace('_', ' ')} must be {words}, got {got:g}.",
                f"Use another {option}.",
            )


def _check_task(request: Request, task: int, held: Names) -> None:
    """Refuse options that no draw could fulfil."""
    classes, images = len(held), sum(map(len, held.values()))
    if request.kind == "hepco":
        counts = draws.hepco_counts(
            classes, images, request.kappa, request.gamma, request.imbalance
        )
        if not sum(counts):
            raise UsageError(
                f"task {task} has {images / classes:g} images per class, of which gamma = "
                f"{request.gamma:g} leaves none.",
                action="Use a larger --gamma, or more images per class.",
            )
        return
    if request.kind == "quantity" and not 1 <= request.alpha <= classes:
        raise UsageError(
            f"a client cannot hold alpha = {request.alpha} classes of task {task}, which has "
            f"{classes}.",
            action=f"Use an --alpha from 1 to {classes}.",
        )
    if request.kind == "quantity" and request.alpha * request.clients < classes:
        raise UsageError(
            f"{count_of(request.clients, 'client')} of {count_of(request.alpha, 'class')} cannot "
            f"own the {classes} classes of task {task}.",
            action="Use a larger --alpha or more --clients.",
        )
    if request.clients * request.min_images > images:
        raise UsageError(
            f"task {task} has {images} train images, too few for {request.clients} clients of "
            f"{request.min_images} or more.",
            action="Use fewer --clients, larger tasks, or a smaller --min-images.",
        )
