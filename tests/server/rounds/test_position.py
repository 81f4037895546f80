"""What a status reads of a run: before it shows a phase, a fixed one, and one that is described live."""

from fcil_server.rounds.position import RunProgress


def test_a_run_that_has_shown_no_phase_yet_is_starting():
    progress = RunProgress()
    assert (progress.phase, progress.waiting_for) == ("starting", "")


def test_a_live_phase_is_described_whenever_it_is_read_until_the_next_is_shown():
    progress, missing = RunProgress(), ["a", "b"]
    progress.show_live(lambda: "gathering", lambda: f"{len(missing)} updates")
    assert progress.waiting_for == "2 updates"
    missing.pop()
    assert (progress.phase, progress.waiting_for) == ("gathering", "1 updates")
    progress.show("done")
    assert (progress.phase, progress.waiting_for) == ("done", "")


def test_whoever_asks_for_the_phase_alone_waits_for_no_look_at_every_client():
    progress, looks = RunProgress(), []
    progress.show_live(lambda: "gathering", lambda: looks.append(1) or "clients")
    assert progress.phase == "gathering"
    assert not looks
