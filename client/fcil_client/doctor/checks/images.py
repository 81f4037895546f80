"""Checks of a folder of images, as a client would find it."""

from __future__ import annotations

from fcil_client.doctor.checks.facts import DoctorFacts, ImageFacts, Skip
from fcil_client.doctor.checks.findings import (
    Finding,
    failure,
    of_error,
    ok,
    skipped,
    some,
    warning,
)
from fcil_client.doctor.checks.register import of_facts
from fcil_protocol.errors import DataError

FEW = 5  # images of a class below which learning it is luck


def _usable(facts: DoctorFacts) -> ImageFacts | Skip | None:
    if isinstance(facts.images, ImageFacts) and facts.images.error is not None:
        return Skip("the folder cannot be used")
    return facts.images


check = of_facts(_usable)


@of_facts(lambda facts: facts.images)(
    "images.folder", "the folder, or other source, can be read as classes of images"
)
def folder(facts: ImageFacts) -> Finding:
    if facts.error is not None:
        return of_error(facts.error)
    return ok(f"{facts.path}, a {facts.form} with {facts.files:,} image files")


@check("images.layout", "files and folders that the layout leaves out, and class names refused")
def layout(facts: ImageFacts) -> Finding:
    if not facts.left_out:
        return ok("every image is in a class folder with a usable name")
    return warning(some(facts.left_out), "Move or rename them; until then they are ignored.")


@check("images.unreadable", "files that are not readable images")
def unreadable(facts: ImageFacts) -> Finding:
    looked, bad, rest = facts.files - facts.unlooked, len(facts.unreadable), ""
    if facts.unlooked:
        rest = f"; {facts.unlooked:,} of {facts.files:,} were not checked for lack of time"
    if not bad:
        return ok(f"all {looked:,} that were checked can be read{rest}")
    text = f"{bad:,} of {looked:,} cannot be read{rest}: {some(facts.unreadable)}"
    remedy = "Replace or remove them; a client skips them."
    return failure(text, remedy, DataError) if bad >= looked else warning(text, remedy)


@check("images.classes", "classes and the number of images in each")
def classes(facts: ImageFacts) -> Finding:
    totals = {c: sum(sides.values()) for c, sides in facts.counts.items()}
    if not totals:
        return skipped("no image could be read")
    listed = some((f"{c} {n:,}" for c, n in sorted(totals.items(), key=lambda p: -p[1])), most=8)
    return ok(f"{len(totals)} class{'es' * (len(totals) != 1)}: {listed}")


@check("images.small", "classes with too few images to learn or to measure")
def small(facts: ImageFacts) -> Finding:
    if facts.unlooked:
        return skipped("not all images were checked")
    totals = sorted((c, sum(sides.values())) for c, sides in facts.counts.items())
    few = [f"{c} has {n}" for c, n in totals if n < FEW]
    if not few:
        return ok(f"every class has at least {FEW} images")
    remedy = (
        f"Add images: a class with fewer than {FEW} is learned poorly and can hardly be measured."
    )
    return warning(some(few), remedy)


@check("images.duplicates", "the same image in several classes")
def duplicates(facts: ImageFacts) -> Finding:
    if not facts.duplicates:
        return ok("no image is in two classes")
    examples = some(" = ".join(files[:3]) for files in facts.duplicates)
    count = len(facts.duplicates)
    return warning(
        f"{count:,} image{'s are' if count != 1 else ' is'} in several classes: {examples}",
        "Leave each in the class that it shows: one image with two labels teaches neither.",
    )


@check("images.sides", "images for training, for tuning and for tests")
def sides(facts: ImageFacts) -> Finding:
    train, select, test = (facts.images(side) for side in ("train", "select", "test"))
    text = f"{train:,} for training, {select:,} for tuning, {test:,} for tests"
    text += "" if facts.enrolled else " (about: the split is drawn when the folder joins)"
    if not train and facts.counts:
        return failure(text, "Put images into the class folders, or into train/.", DataError)
    if facts.notes:
        remedy = "Nothing, if this is intended; otherwise add images."
        return warning(f"{text}; {some(facts.notes)}", remedy)
    return ok(text)
