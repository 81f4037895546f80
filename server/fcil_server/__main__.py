"""``python -m fcil_server`` is ``fcil-server``."""

from fcil_server.cli.main import main

main()
