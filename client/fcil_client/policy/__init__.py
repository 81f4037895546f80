"""Rules for working on this device: battery, heat, hours and idle time.

A *policy* is the owner's rules; a *sensor* is a source of facts about the machine.
"""
