"""What ``fcil-client doctor`` looks at: a machine, and what a client needs of it.

Each section has two modules: one that turns facts into lines and does nothing else (`machine`,
`engines`, `backbone`, `images`, `membership`, `network`, `disk`, `daemon`), and one that gathers
the facts (``look_...``). `examination` does both, in the order in which people read them.
"""
