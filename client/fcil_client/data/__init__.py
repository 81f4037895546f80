"""The image folder, its classes and its partitions.

A *manifest* lists the images of a folder; a *partition* divides one folder among several clients.
"""
