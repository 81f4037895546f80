"""Nothing is skipped in silence: a reason that is not on this list fails the run.

What is loaded with the tests lives as long as they do: the garbage collector passes over it, which
saves a tenth of their processor time. Hypothesis has no time limits: on a busy machine an example
takes as long as it takes.
"""

import functools
import gc
import os
import re

import pytest
import typer.testing
from hypothesis import HealthCheck, settings

settings.register_profile("fcil", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fcil")

# What a machine may lack, and where that is tested instead of here.
MAY_BE_SKIPPED = {
    r"needs fcil\[ray\]": "an extra for few; scripts/test --full says so",
    r"needs fcil\[peft\]": "an extra of 150 MB; scripts/test --full installs it",
    r"needs fcil\[contract\]": "an extra of 10 packages; scripts/test --full installs it",
    r"could not import 'mlflow'": "an extra of 18 packages",
    r"could not import 'opentelemetry": "an extra of 9 packages",
    r"could not import 'wandb'": "an extra of 15 packages, with a binary of 50 MB",
    r"could not import 'datasets'": "an extra for few, with pyarrow",
    r"could not import 'mkdocs'": "scripts/test --full installs it",
    r"Postgres is not installed here": "scripts/test --full installs one",
    r"FCIL_S3_SERVER names no server": "scripts/test --full installs one",
    r"no (user |network )?namespaces": "containers often forbid them",
    r"(kubectl|systemd-analyze|promtool) is not installed": "no package of Python brings it",
    r"git is not installed|this is no git checkout": "an archive of the sources",
    r"this machine has no ": "IPv6, or what only some kernels tell",
    r"Linux|the kernel does not say who asks": "another system than Linux",
}
_skipped = pytest.StashKey[list[str]]()


# Typer makes all commands of a program anew for each call in a test: 50 ms, and some tests make ten.
typer.testing._get_command = functools.cache(typer.testing._get_command)


@pytest.fixture(scope="session", autouse=True)
def ledgers_in_postgres():
    """With FCIL_LEDGERS_IN=postgres, let the ledgers that tests make be in Postgres."""
    if os.environ.get("FCIL_LEDGERS_IN") != "postgres":
        yield
        return
    import postgres_kit  # which loads the server

    with postgres_kit.cluster() as cluster, postgres_kit.new_ledgers_in(cluster.url):
        yield


def pytest_collection_finish(session):
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_configure(config):
    gc.disable()  # until all tests are loaded
    config.stash[_skipped] = []
    config.pluginmanager.register(_Skips(config), "fcil-skips")


class _Skips:
    """Collects the skips that nobody has allowed, in the process that reports."""

    def __init__(self, config):
        self._config = config

    def _take(self, report):
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(re.search(known, reason) for known in MAY_BE_SKIPPED):
            self._config.stash[_skipped].append(f"{report.nodeid}: {reason}")

    def pytest_runtest_logreport(self, report):
        self._take(report)

    def pytest_collectreport(self, report):
        self._take(report)

    def pytest_sessionfinish(self, session):
        if self._config.stash[_skipped] and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        for skipped in self._config.stash[_skipped]:
            terminalreporter.write_line(f"skipped, and not on the list: {skipped}", red=True)
