"""The class registry: who may name what, and which ids come of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import sample_run
from fcil_protocol.errors import ConfigError, InternalError, UsageError
from fcil_protocol.ids import RoundKey
from fcil_server.ledger.ledger import Ledger
from fcil_server.rounds.asking import class_registry
from fcil_server.rounds.class_changes import apply_change, class_list
from fcil_server.rounds.classes import ClassRegistry, refused_names
from sample_run import ALICE, BOB, GONE, RUN, Clock


@pytest.fixture
def ledger(tmp_path: Path):
    with Ledger(tmp_path / "ledger.sqlite", clock=Clock()) as opened:
        sample_run.add_clients(opened)
        sample_run.add_run(opened)
        yield opened


@pytest.fixture
def registry(ledger: Ledger) -> ClassRegistry:
    return ClassRegistry(ledger, RUN, quota=4)


class TestDiscovered:
    def test_ids_do_not_depend_on_who_came_first(self, registry: ClassRegistry) -> None:
        registry.announce(BOB, ["oak", "cat"])
        registry.announce(ALICE, ["Dog", "cat"])
        assert [c.name for c in registry.pending()] == ["cat", "Dog", "oak"]
        task = registry.open_task(0)
        assert (task.classes, task.past) == ((0, 1, 2), ())
        assert registry.names() == {0: "cat", 1: "Dog", 2: "oak"}
        assert registry.pending() == []

    def test_later_names_get_the_next_ids(self, registry: ClassRegistry) -> None:
        registry.announce(ALICE, ["zebra"])
        registry.open_task(0)
        registry.announce(BOB, ["ant", "zebra"])
        task = registry.open_task(1)
        assert (task.index, task.classes, task.past, task.seen) == (1, (1,), (0,), (0, 1))
        assert registry.names() == {0: "zebra", 1: "ant"}

    def test_names_match_in_any_case_and_unicode_form(self, registry: ClassRegistry) -> None:
        """Precomposed and combining, upper and lower, with spaces: one class."""
        first = registry.announce(ALICE, ["Käse"])
        second = registry.announce(BOB, ["ka\u0308se", " KÄSE "])
        assert first.new == ("Käse",)
        assert (second.accepted, second.new) == (("ka\u0308se", " KÄSE "), ())
        registry.open_task(0)
        assert registry.names_for(["ka\u0308se", " KÄSE "]) == {"ka\u0308se": 0, " KÄSE ": 0}

    def test_one_client_may_spell_a_name_twice(self, registry: ClassRegistry) -> None:
        answer = registry.announce(ALICE, ["Cat", "cat"])
        assert (answer.accepted, answer.new) == (("Cat", "cat"), ("Cat",))

    def test_bad_names_are_refused_with_a_reason_and_the_rest_goes_on(
        self, registry: ClassRegistry
    ) -> None:
        bad = ["", "a\nb", "x" * 129, "\ud800"]
        answer = registry.announce(ALICE, [*bad, "fine"])
        assert answer.accepted == ("fine",)
        assert [name for name, _ in answer.refused] == bad
        assert [why.split("must be ")[1] for _, why in answer.refused] == [
            "non-empty, trimmed and in Unicode NFC",
            "printable",
            "at most 128 bytes",
            "printable",
        ]

    def test_refused_names_are_one_sentence_for_each_reason_however_many_they_are(self) -> None:
        many = [(f"n{i}", "the run does not list it") for i in range(4_000)]
        assert refused_names([*many, ("", "must be non-empty")]) == [
            "4,000 classes: 'n0', 'n1', 'n2' and 3,997 more: the run does not list it",
            "class '': must be non-empty",
        ]
        assert refused_names(many[:2]) == ["2 classes: 'n0', 'n1': the run does not list it"]
        assert refused_names([]) == []

    def test_the_quota_counts_what_a_client_was_first_to_bring(
        self, registry: ClassRegistry
    ) -> None:
        registry.announce(BOB, ["shared"])
        answer = registry.announce(ALICE, ["shared", "a", "b", "c"])
        assert answer.refused == ()
        answer = registry.announce(ALICE, ["d", "e", "a"])
        assert answer.accepted == ("d", "a")
        assert answer.refused == (("e", "a client may bring at most 4 class names"),)
        assert registry.announce(GONE, ["e"]).accepted == ("e",)

    def test_pending_names_say_how_long_they_wait(
        self, ledger: Ledger, registry: ClassRegistry
    ) -> None:
        start = ledger.now
        registry.announce(ALICE, ["b"])
        ledger.database.clock.now += 60
        registry.announce(ALICE, ["a", "b"])
        assert {c.name: c.seen_at - start for c in registry.pending()} == {"a": 60, "b": 0}

    def test_an_empty_task_never_opens(self, registry: ClassRegistry) -> None:
        with pytest.raises(InternalError, match="without a class"):
            registry.open_task(0)

    def test_a_task_that_is_not_next_changes_nothing(self, registry: ClassRegistry) -> None:
        registry.announce(ALICE, ["a"])
        with pytest.raises(InternalError, match="expected task 0"):
            registry.open_task(3)
        assert [c.class_id for c in registry.pending()] == [None]

    def test_a_client_learns_only_names_that_it_holds(self, registry: ClassRegistry) -> None:
        registry.announce(ALICE, ["a", "b"])
        assert registry.names_for(["a"]) == {}
        registry.open_task(0)
        assert registry.names_for(["b", "stranger"]) == {"b": 1}

    def test_the_registry_survives_a_restart(self, ledger: Ledger, registry: ClassRegistry) -> None:
        registry.announce(ALICE, ["b"])
        registry.open_task(0)
        registry.announce(ALICE, ["a"])
        again = ClassRegistry(ledger, RUN)
        assert again.task_info(0).classes == (0,)
        assert [c.name for c in again.pending()] == ["a"]


class TestListed:
    LISTED = [["oak", "cat"], ["ant"]]

    def test_ids_follow_the_list(self, registry: ClassRegistry) -> None:
        assert registry.register_listed(self.LISTED) == [(0, 1), (2,)]
        assert registry.listed_tasks() == 2
        assert registry.open_task(0).classes == (0, 1)
        assert registry.names_for(["oak", "ant"]) == {"oak": 0}
        assert registry.open_task(1).seen == (0, 1, 2)
        assert registry.names_for(["ANT"]) == {"ANT": 2}

    def test_registering_again_is_harmless_and_other_names_are_refused(
        self, registry: ClassRegistry
    ) -> None:
        registry.register_listed(self.LISTED)
        registry.open_task(0)
        assert registry.register_listed(self.LISTED) == [(0, 1), (2,)]
        for other in ([["oak"], ["cat", "ant"]], [["cat", "oak"], ["ant"]], [["oak", "cat"]]):
            with pytest.raises(ConfigError, match="differ"):
                registry.register_listed(other)

    def test_names_outside_the_list_are_refused(self, registry: ClassRegistry) -> None:
        registry.register_listed(self.LISTED)
        answer = registry.announce(ALICE, ["Cat", "dog"])
        assert answer.accepted == ("Cat",)
        assert answer.refused == (("dog", "the run's listed tasks do not name this class"),)
        assert registry.pending() == []

    @pytest.mark.parametrize(
        ("tasks", "fault"),
        [
            ([], "no task is listed"),
            ([["a"], []], "task 1 lists no class"),
            ([["a", "A"]], "listed in task 0 and again in 0"),
            ([["a"], [" A "]], "listed in task 0 and again in 1"),
            ([["a\tb"]], "printable"),
            ([["a\tb"], []], "printable; task 1 lists no class"),
        ],
    )
    def test_a_bad_list_names_every_fault_and_changes_nothing(
        self, ledger: Ledger, registry: ClassRegistry, tasks: list[list[str]], fault: str
    ) -> None:
        with pytest.raises(ConfigError, match=fault):
            registry.register_listed(tasks)
        assert ledger.classes.all(RUN) == []


class TestOperator:
    def test_a_renamed_class_keeps_its_id_and_its_old_name(self, registry: ClassRegistry) -> None:
        registry.announce(ALICE, ["tabby"])
        registry.open_task(0)
        registry.rename("Tabby", "cat")
        assert registry.names() == {0: "cat"}
        assert registry.names_for(["tabby", "cat"]) == {"tabby": 0, "cat": 0}
        assert registry.announce(BOB, ["TABBY"]).new == ()
        registry.rename("tabby", "Feline")
        assert registry.names_for(["tabby", "cat", "feline"]) == dict.fromkeys(
            ("tabby", "cat", "feline"), 0
        )

    def test_a_renaming_can_be_undone_and_another_classs_name_stays_taken(
        self, registry: ClassRegistry
    ) -> None:
        registry.announce(ALICE, ["cat", "dog"])
        registry.open_task(0)
        registry.rename("cat", "dgo")
        registry.rename("dgo", "cat")
        assert registry.names() == {0: "cat", 1: "dog"}
        assert registry.names_for(["dgo", "cat"]) == {"dgo": 0, "cat": 0}
        registry.rename("dog", "hound")
        with pytest.raises(UsageError, match="'dog' names a class already"):
            registry.rename("cat", "dog")

    def test_only_the_spelling_may_change_too(self, registry: ClassRegistry) -> None:
        registry.announce(ALICE, ["cat"])
        registry.rename("cat", "Cat")
        assert [c.name for c in registry.pending()] == ["Cat"]

    def test_a_waiting_name_and_its_aliases_merge_into_another_class(
        self, registry: ClassRegistry
    ) -> None:
        registry.announce(ALICE, ["cat"])
        registry.open_task(0)
        registry.announce(BOB, ["kitty"])
        registry.alias("kitten", "kitty")
        registry.alias("kitty", "cat")
        assert registry.pending() == []
        assert registry.names_for(["kitty", "kitten"]) == {"kitty": 0, "kitten": 0}

    @pytest.mark.parametrize(
        "change",
        [
            lambda r: r.alias("dog", "cat"),
            lambda r: r.alias("cat", "cat"),
            lambda r: r.rename("cat", "DOG"),
            lambda r: r.rename("nobody", "x"),
            lambda r: r.rename("cat", "a\nb"),
            lambda r: r.hide("nobody"),
        ],
    )
    def test_what_would_mix_classes_is_refused_and_changes_nothing(
        self, ledger: Ledger, registry: ClassRegistry, change
    ) -> None:
        registry.announce(ALICE, ["cat", "dog"])
        registry.open_task(0)
        before = ledger.classes.all(RUN), ledger.classes.aliases(RUN)
        with pytest.raises(UsageError):
            change(registry)
        assert (ledger.classes.all(RUN), ledger.classes.aliases(RUN)) == before

    def test_hidden_names_stay_out_of_tasks_and_away_from_clients(
        self, registry: ClassRegistry
    ) -> None:
        registry.announce(ALICE, ["cat", "secret"])
        registry.hide("secret")
        assert registry.open_task(0).classes == (0,)
        registry.hide("cat")
        assert registry.names_for(["cat", "secret"]) == {}
        registry.hide("secret", hidden=False)
        assert [c.name for c in registry.pending()] == ["secret"]


class TestHeldUnderAnotherName:
    def test_a_class_is_found_by_its_name_and_all_that_stand_for_it(
        self, registry: ClassRegistry
    ) -> None:
        registry.announce(ALICE, ["cat", "dog"])
        registry.open_task(0)
        registry.alias("Katze", "cat")
        registry.rename("cat", "felis")
        assert registry.keys_of([0]) == {"felis", "cat", "katze"}
        assert registry.keys_of([0, 1]) == {"felis", "cat", "katze", "dog"}
        assert registry.keyed([1, 0]) == {"felis": 0, "cat": 0, "katze": 0, "dog": 1}
        assert registry.canonical(["katze", "cat", "dog", "oak"]) == {"felis", "dog", "oak"}

    def test_nobody_holds_a_hidden_class(self, registry: ClassRegistry) -> None:
        registry.announce(ALICE, ["cat", "dog"])
        registry.open_task(0)
        registry.alias("Katze", "cat")
        registry.hide("cat")
        assert registry.keys_of([0, 1]) == {"dog"}


class TestAdmitting:
    @pytest.fixture
    def careful(self, ledger: Ledger) -> ClassRegistry:
        return ClassRegistry(ledger, RUN, quota=4, confirm=True)

    def test_new_names_wait_for_a_word(self, careful: ClassRegistry) -> None:
        careful.announce(ALICE, ["dog", "cat"])
        assert careful.pending() == []
        assert [c.name for c in careful.awaiting_admission()] == ["cat", "dog"]
        careful.admit("DOG")
        assert [c.name for c in careful.pending()] == ["dog"]
        assert careful.open_task(0).classes == (0,)
        assert careful.names() == {0: "dog"}

    def test_who_announces_it_again_does_not_admit_it(self, careful: ClassRegistry) -> None:
        careful.announce(ALICE, ["cat"])
        careful.announce(BOB, ["Cat"])
        assert careful.pending() == []

    def test_all_that_wait_are_admitted_where_none_is_named(self, careful: ClassRegistry) -> None:
        careful.announce(ALICE, ["dog", "cat"])
        careful.hide("dog")
        assert apply_change(careful, {"change": "admit", "names": []}) == ["cat"]
        assert [c.name for c in careful.pending()] == ["cat"]

    def test_a_waiting_name_can_be_merged_into_a_class(
        self, ledger: Ledger, careful: ClassRegistry
    ) -> None:
        careful.announce(ALICE, ["cat"])
        apply_change(careful, {"change": "admit"})
        careful.open_task(0)
        careful.announce(BOB, ["Katze"])
        assert apply_change(careful, {"change": "alias", "names": ["katze", "cat"]})
        assert careful.awaiting_admission() == []
        [row] = class_list(ledger, RUN)
        assert (row["name"], row["aliases"], row["first_seen_by"]) == ("cat", ["katze"], "alice")

    @pytest.mark.parametrize(
        ("fields", "what"),
        [
            ({"change": "burn", "names": ["cat"]}, "one of admit, alias, rename, hide, show"),
            ({"change": "alias", "names": ["cat"]}, "takes two names, got 1"),
            ({"change": "rename", "names": ["a", "b", "c"]}, "takes two names, got 3"),
            ({"change": "hide", "names": ["unheard"]}, "has no class 'unheard'"),
            ({}, "one of admit"),
        ],
    )
    def test_what_cannot_be_done_is_said(
        self, careful: ClassRegistry, fields: dict[str, object], what: str
    ) -> None:
        with pytest.raises(UsageError, match=what):
            apply_change(careful, fields)


class TestSignedNames:
    """In a round of masked sums clients sign all names of a task; others would spoil the sum."""

    @pytest.mark.parametrize("change", ["hide", "show", "alias", "rename"])
    def test_names_change_before_and_after_it_and_not_meanwhile(
        self, ledger: Ledger, registry: ClassRegistry, change: str
    ) -> None:
        registry.announce(ALICE, ["cat", "dog"])
        registry.open_task(0)
        names = {"alias": ["Katze", "cat"], "rename": ["cat", "felis"]}.get(change, ["cat"])
        own = RoundKey(RUN, 0, "train", 0)
        for state, kind in enumerate(("mask_keys", "mask_shares"), 1):
            assert not registry.are_signed()
            key = RoundKey(RUN, 0, kind, 0)
            ledger.rounds.open(key, asked=[ALICE], base_state=state - 1)
            ledger.rounds.close(key, "done", new_state=state)
        for _ in range(2):  # before it has asked somebody, and since
            with pytest.raises(UsageError, match="clients sign the names of classes"):
                apply_change(registry, {"change": change, "names": names})
            if ledger.rounds.current(RUN) is None:
                ledger.rounds.open(own, asked=[ALICE], base_state=2)
        ledger.rounds.close(own, "done", new_state=3)
        assert apply_change(registry, {"change": change, "names": names}) == names

    def test_a_round_of_shares_that_failed_is_followed_by_none(
        self, ledger: Ledger, registry: ClassRegistry
    ) -> None:
        registry.announce(ALICE, ["cat"])
        registry.open_task(0)
        key = RoundKey(RUN, 0, "mask_shares", 0)
        ledger.rounds.open(key, asked=[ALICE], base_state=0)
        ledger.rounds.close(key, "skipped")
        assert not registry.are_signed()


@pytest.mark.parametrize("shared", [False, True])
def test_a_client_is_told_its_own_names_and_of_the_others_what_they_share(
    ledger: Ledger, registry: ClassRegistry, shared: bool
) -> None:
    registry.announce(ALICE, ["cat", "dog", "emu"])
    registry.open_task(0)
    registry.alias("Katze", "cat")
    registry.hide("dog")
    context = SimpleNamespace(
        run=RUN, ledger=ledger, classes=registry,
        config=SimpleNamespace(privacy=SimpleNamespace(share_names=shared)),
    )  # fmt: skip
    told = class_registry(context, SimpleNamespace(names=["Katze", "dog"]), registry.task_info(0))
    names = dict(zip(told.payload.meta["names"], told.payload.i64("class").tolist(), strict=True))
    assert names == {"Katze": 0} | ({"emu": 2} if shared else {})
