"""Checks of ``fcil-client doctor``: the machine, and a client's requirements of it.

Each section has two modules: one that turns facts into lines and does nothing else (`machine`,
`engines`, `backbone`, `images`, `membership`, `network`, `disk`, `daemon`), and one that gathers
the facts (``look_...``). `examination` runs both, in the order in which people read them.
"""
