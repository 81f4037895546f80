"""What every command has: machines can read what it answers."""

import typer

import fcil_client.cli
import fcil_server.cli

# They run until they are stopped; their words are a log, which has a form of its own.
DAEMONS = {"fcil-server serve", "fcil-server relay"}


def commands(command, path):
    below = getattr(command, "commands", None)
    if below is None:
        yield " ".join(path), {o for p in command.params for o in p.opts}
        return
    for name, sub in below.items():
        yield from commands(sub, [*path, name])


def all_commands():
    for name, app in (("fcil-server", fcil_server.cli.app), ("fcil-client", fcil_client.cli.app)):
        yield from commands(typer.main.get_command(app), [name])


def test_every_command_answers_in_json_if_asked():
    without = {path for path, options in all_commands() if not {"--json", "--format"} <= options}
    assert without == DAEMONS


def test_the_list_of_commands_is_not_empty():
    assert len(list(all_commands())) > 25
