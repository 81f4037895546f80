"""Listings without files: what a partition is made of, as fast as it can be had."""

from fcil_adapters.images.image_source import ImageEntry, Listing


def listing(classes, train, test=0, *, layout=True):
    """Return classes (a number: named c00, c01, ..., or names) of so many images each.

    `train` may be a list: one number for each class.
    """
    names = [f"c{i:02d}" for i in range(classes)] if isinstance(classes, int) else list(classes)
    sizes = train if isinstance(train, list) else [train] * len(names)
    entries = []
    for side, counts in (("train", sizes), ("test", [test] * len(names))):
        for name, n in zip(names, counts, strict=True):
            for i in range(n):
                path = f"{side}/{name}/{i:04d}.png" if layout else f"{name}/{i:04d}.png"
                entries.append(ImageEntry(path, name, side if layout else None, 100 + i, 7))
    return Listing(tuple(entries), ())
