"""Services of every fcil process: terminal, log file, signals, control socket.

The *control socket* is a file in the directory of a daemon, through which commands on the same
machine reach it.
"""
