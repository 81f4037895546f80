"""The federation directory: configuration, roster and eligibility.

The *roster* lists the members; the *allow-list* names the keys that may connect; *eligibility*
decides which members may take part.
"""
