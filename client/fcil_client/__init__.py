"""The client: a daemon that keeps images on its device and sends sealed updates."""
