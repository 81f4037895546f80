"""Intake processes: each holds a part of the clients' connections for one server."""
