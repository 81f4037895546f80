"""The work of one round and its worker.

A *round* asks a client to train on the current task's images and to send one update.
"""
