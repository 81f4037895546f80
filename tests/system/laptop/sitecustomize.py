"""A laptop: what its battery says stands in the file that ``FCIL_TEST_POWER`` names."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil

_POWER = Path(os.environ["FCIL_TEST_POWER"])


def sensors_battery():
    return SimpleNamespace(percent=80.0, power_plugged=_POWER.read_text() == "mains")


psutil.sensors_battery = sensors_battery
psutil.sensors_temperatures = dict

if "join" in sys.orig_argv:
    from fcil_client.policy import sensors, watch

    sensors.read_zones = lambda _: []
    watch.READ_S = 0.1
