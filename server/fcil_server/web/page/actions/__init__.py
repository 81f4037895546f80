"""Operator actions on the dashboard.

An *action* needs a *confirmation* that is good for one session and one use.
"""
