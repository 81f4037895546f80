"""``python -m fcil_client`` is ``fcil-client``."""

from fcil_client.cli.main import main

main()
