"""``python -m fcil_client`` is ``fcil-client``."""

from fcil_client.cli import main

main()
