"""``python -m fcil_server.lab`` is ``scripts/reproduce``."""

from fcil_server.lab.cli import main

main()
