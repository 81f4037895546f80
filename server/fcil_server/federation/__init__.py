"""The federation directory: config, roster and eligibility.

The *roster* lists the members; the *allow-list* names the keys that may connect; *eligibility*
says which members a run counts.
"""
