"""Images from folders, archives and lists to decoded arrays.

A *source* lists and opens image files; the *cache* keeps decoded images; a *sample* is a small
fixed choice of them.
"""
