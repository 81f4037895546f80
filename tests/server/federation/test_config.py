"""federation.toml: every fault found at once, in words that lead to the right key."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcil_protocol.errors import ConfigError
from fcil_protocol.messages.messages import NO_PRIVACY
from fcil_server.federation.addresses import split_address
from fcil_server.federation.config import (
    ELSEWHERE,
    Config,
    as_file,
    known_keys,
    load,
    parse,
    to_toml,
    validate,
)
from fcil_server.federation.sections import FederationSection
from fcil_server.runs.resources import kept_states


def fault(fields: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        validate(fields)
    assert error.value.message.endswith(".")
    return error.value.message


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "federation.toml"


class TestReading:
    def test_nothing_given_is_all_defaults(self, file: Path) -> None:
        file.write_text("")
        assert load(None) == load(file) == parse("") == Config()

    def test_what_is_given_counts_and_the_rest_is_default(self, file: Path) -> None:
        file.write_text('[round]\nmin_clients = 7\n[method]\nname = "running_mean"\nside = 16\n')
        config = load(file)
        assert (config.round.min_clients, config.round.quorum) == (7, 0)
        assert (config.method.name, config.method.options) == ("running_mean", {"side": 16})

    def test_a_file_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"no configuration file .*missing\.toml"):
            load(tmp_path / "missing.toml")

    def test_a_file_with_faults_is_named_and_one_without_is_not(self, file: Path) -> None:
        file.write_text('[round]\ndeadline_s = "soon"\n')
        with pytest.raises(ConfigError, match=r"^in .*federation\.toml: round\.deadline_s: "):
            load(file, ["round.min_clients=3"])
        both = (
            r"^round\.quorum: .*'soon'\. Of these, .*federation\.toml has: round\.quorum: .*'all'\."
        )
        file.write_text('[round]\nquorum = "all"\n')
        with pytest.raises(ConfigError, match=both) as told:
            load(file, ["round.deadline_s=soon"])
        assert told.value.message.count("'soon'") == 1
        file.write_text("[round]\ndeadline_s = 9\n")
        with pytest.raises(ConfigError, match=r"^round\.deadline_s: "):
            load(file, ["round.deadline_s=soon"])

    @pytest.mark.parametrize("data", [b"[round\n", b"a = = 1", b"a = 1\na = 2\n"])
    def test_a_file_that_is_not_toml_is_named_with_the_place(self, file: Path, data: bytes) -> None:
        file.write_bytes(data)
        with pytest.raises(ConfigError, match=r"federation\.toml is not TOML: .*line \d"):
            load(file)

    def test_a_file_of_other_bytes_or_a_directory_cannot_be_read(
        self, file: Path, tmp_path: Path
    ) -> None:
        file.write_bytes(b"\xff\xfe")
        with pytest.raises(ConfigError, match="cannot read"):
            load(file)
        with pytest.raises(ConfigError, match="is a folder, expected a TOML file"):
            load(tmp_path)

    def test_a_file_that_was_cut_between_two_lines_does_not_pass_for_one_with_defaults(
        self, file: Path
    ) -> None:
        text = as_file(Config())
        file.write_text(text)
        assert load(file) == Config()
        lines = text.splitlines(keepends=True)
        for count in range(1, len(lines)):
            file.write_text("".join(lines[:count]))
            with pytest.raises(ConfigError, match="cut short"):
                load(file)
        file.write_text("".join(lines[: lines.index("[trust]\n")]))
        with pytest.raises(ConfigError, match=r"\[trust\]"):
            load(file)

    def test_a_file_of_the_operators_own_needs_no_end(self, file: Path) -> None:
        file.write_text("[round]\nquorum = 3\n")
        assert load(file).round.quorum == 3

    def test_a_snapshot_that_is_damaged_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="not TOML"):
            parse("[round")

    def test_a_run_that_began_before_there_were_halves_goes_on_without(self) -> None:
        assert Config().wire.half == "weights"
        assert parse("[wire]\nwindow_mb = 4.0\n").wire.half == "none"
        assert parse(to_toml(Config())).wire.half == "weights"

    def test_a_run_that_began_before_there_were_compact_payloads_goes_on_without(self) -> None:
        assert Config().wire.compact is True
        assert parse("[wire]\nwindow_mb = 4.0\n").wire.compact is False
        assert parse(to_toml(Config())).wire.compact is True

    def test_a_file_of_before_a_round_was_one_file_may_keep_the_size_of_its_segments(
        self, file: Path
    ) -> None:
        file.write_text("[storage]\nkeep_states = 5\nsegment_mb = 64\n")
        assert load(file).storage.keep_states == 5
        assert parse(file.read_text()) == load(file)
        assert "segment_mb" not in to_toml(load(file))

    def test_a_configuration_cannot_be_changed_afterwards(self) -> None:
        config = Config()
        with pytest.raises(ValueError, match="frozen"):
            config.round.min_clients = 1  # type: ignore[misc]


class TestFaults:
    def test_all_faults_are_told_at_once(self) -> None:
        message = fault(
            {
                "round": {"min_clients": 0, "deadline_s": -1, "min_cleints": 3},
                "wire": {"window_mb": 65},
                "run": {"seed": "x"},
            }
        )
        for key in (
            "round.min_clients",
            "round.deadline_s",
            "min_cleints",
            "wire.window_mb",
            "run.seed",
        ):
            assert key in message

    @pytest.mark.parametrize(
        ("fields", "wanted"),
        [
            (
                {"round": {"min_cleints": 3}},
                "'round.min_cleints' (did you mean 'round.min_clients'?)",
            ),
            ({"rounds": {}}, "'rounds' (here it is called 'round.rounds_per_task')"),
            ({"federaton": {}}, "'federaton' (did you mean 'federation'?)"),
            ({"storage": {"keep_state": 1}}, "(did you mean 'storage.keep_states'?)"),
            ({"zzzz": 1}, "unknown key 'zzzz'."),
        ],
    )
    def test_an_unknown_key_names_the_nearest_known_one(
        self, fields: dict[str, Any], wanted: str
    ) -> None:
        assert wanted in fault(fields)

    @pytest.mark.parametrize("word", sorted(ELSEWHERE))
    def test_words_of_other_frameworks_are_understood_as_a_hint_only(self, word: str) -> None:
        """Wherever they stand; they set nothing."""
        for fields in ({word: 1}, {"round": {word: 1}}):
            assert f"(here it is called {ELSEWHERE[word]!r})" in fault(fields)

    @pytest.mark.parametrize("word", sorted(ELSEWHERE))
    def test_each_hint_leads_to_a_key_that_exists(self, word: str) -> None:
        target = ELSEWHERE[word]
        assert target in set(known_keys()) or target.startswith("method.")
        assert word not in set(known_keys())

    @pytest.mark.parametrize(
        ("section", "key", "value"),
        [
            ("federation", "name", "x" * 129),
            ("federation", "heartbeat_s", 0),
            ("federation", "heartbeat_s", float("inf")),
            ("federation", "advertise", "127.0.0.1:1"),
            ("run", "seed", -1),
            ("run", "seed", 1.5),
            ("run", "threads", -1),
            ("run", "worker_idle_s", float("nan")),
            ("run", "backbone", 7),
            ("tasks", "schedule", "random"),
            ("tasks", "classes", ["cat"]),
            ("tasks", "min_new_classes", 0),
            ("tasks", "settle_s", -1),
            ("round", "rounds_per_task", 0),
            ("round", "clients_per_round", -1),
            ("round", "on_short", "wait"),
            ("round", "max_reopens", -1),
            ("round", "deadline_s", "soon"),
            ("wire", "max_payload_mb", 0),
            ("wire", "window_mb", 0.1),
            ("wire", "window_mb", 33),
            ("privacy", "evaluate_min_count", 0),
            ("privacy", "min_count", 0),
            ("privacy", "noise_multiplier", -1),
            ("privacy", "clip", -1),
            ("privacy", "delta", 0),
            ("privacy", "delta", 1),
            ("privacy", "max_epsilon", -1),
            ("trust", "max_weight_share", 0),
            ("trust", "max_weight_share", 1.01),
            ("trust", "outlier_factor", -1),
            ("trust", "outlier_min_clients", 2),
            ("trust", "averaging", "krum"),
            ("trust", "trim", 0.5),
            ("trust", "trim", 0),
            ("trust", "clip", 0.9),
            ("trust", "max_classes_per_client", 0),
            ("storage", "keep_states", 0),
            ("method", "name", 7),
        ],
    )
    def test_a_value_out_of_range_is_told_with_its_key_and_what_was_got(
        self, section: str, key: str, value: Any
    ) -> None:
        message = fault({section: {key: value}})
        assert f"{section}.{key}" in message
        assert ", got " in message

    @pytest.mark.parametrize("section", list(Config.model_fields))
    def test_a_section_that_is_no_section_is_told(self, section: str) -> None:
        assert section in fault({section: 3})


class TestCrossChecks:
    def test_listed_tasks_need_classes(self) -> None:
        assert "list the class names" in fault({"tasks": {"schedule": "listed"}})

    def test_classes_need_the_listed_schedule(self) -> None:
        assert "set it to 'listed'" in fault({"tasks": {"classes": [["cat"]]}})

    def listed(self, *tasks: list[str]) -> str:
        return fault({"tasks": {"schedule": "listed", "classes": list(tasks)}})

    def test_a_task_without_a_class_is_told_with_its_number(self) -> None:
        assert "tasks.classes[1] is empty" in self.listed(["cat"], [])

    @pytest.mark.parametrize("again", ["cat", "CAT", "Cat"])
    def test_a_class_in_two_tasks_is_told_with_both(self, again: str) -> None:
        message = self.listed(["dog"], ["cat"], [again])
        assert f"tasks.classes[2]: {again!r} is already in task 1" in message

    def test_a_class_twice_in_one_task_is_told(self) -> None:
        assert "is already in task 0" in self.listed(["cat", "cat"])

    @pytest.mark.parametrize("name", [" cat", "", "a\tb", "x" * 129, "e\u0301"])
    def test_a_name_that_no_folder_could_announce_is_told(self, name: str) -> None:
        assert "a class name must be" in self.listed([name])

    def test_a_quorum_beyond_the_sample_is_told(self) -> None:
        message = fault({"round": {"clients_per_round": 3, "quorum": 4}})
        assert "could never complete" in message
        validate({"round": {"clients_per_round": 3, "quorum": 3}})
        validate({"round": {"clients_per_round": 0, "quorum": 4}})

    def test_with_noise_no_state_is_made_of_one_update(self) -> None:
        noise = {"noise_multiplier": 1.0, "clip": 10.0}
        assert validate({}).least_updates == 1
        assert validate({"privacy": noise}).least_updates == 2
        assert validate({"privacy": noise, "round": {"min_updates": 3}}).least_updates == 3
        message = fault({"privacy": noise, "round": {"min_updates": 1}})
        assert "round.min_updates is 1" in message
        assert "set it to 2 or more, or to 0" in message

    @pytest.mark.parametrize("key", ["take", "clients_per_round"])
    def test_a_round_that_could_never_change_anything_is_refused(self, key: str) -> None:
        message = fault({"round": {"min_updates": 4, key: 3}})
        assert f"round.{key} is 3, and a round needs 4 updates" in message
        validate({"round": {"min_updates": 4, key: 4}})

    def test_more_cannot_be_taken_than_are_asked_nor_a_quorum_be_more_than_is_taken(self) -> None:
        message = fault({"round": {"clients_per_round": 10, "take": 12}})
        assert "round.take is 12 and round.clients_per_round 10" in message
        message = fault({"round": {"take": 3, "quorum": 4}})
        assert "round.quorum is 4 and round.take 3" in message
        validate({"round": {"clients_per_round": 12, "take": 10, "quorum": 10}})
        validate({"round": {"take": 3, "min_clients": 9}})

    def test_an_asynchronous_run_has_a_buffer_and_asks_all_clients(self) -> None:
        message = fault({"round": {"mode": "async"}})
        assert "give the number of updates that make a new state" in message
        message = fault({"round": {"mode": "async", "take": 2, "clients_per_round": 4}})
        assert "round.clients_per_round does nothing while round.mode is 'async'" in message
        validate({"round": {"mode": "async", "take": 2}})

    def test_an_asynchronous_run_keeps_the_states_that_updates_may_start_from(self) -> None:
        least = {"mode": "async", "take": 2, "max_staleness": 7}
        assert kept_states(validate({"round": least})) == 9
        assert kept_states(validate({"round": least, "storage": {"keep_states": 20}})) == 20
        assert (
            kept_states(validate({"round": {"max_staleness": 7}})) == Config().storage.keep_states
        )

    def test_addresses_are_checked_all_of_them(self) -> None:
        message = fault({"federation": {"listen": "nowhere", "advertise": ["a:1", "b:x"]}})
        assert "'nowhere'" in message
        assert "'b:x'" in message
        assert "'a:1'" not in message

    @pytest.mark.parametrize(
        ("half", "words"),
        [
            ("lora", '"weights", "none" or a list of some of "lora", "prompt"'),
            (["lora", "tensor"], "a list of some of"),
            (3, "should be"),
            ([["lora"]], "a list of some of"),
            (["lora", "gaussian"], "are always sent unchanged: gaussian (means and covariances"),
            (["count", "residual"], "count (counts are whole numbers), residual ("),
        ],
    )
    def test_what_cannot_be_a_half_is_told_once_with_what_can(self, half: Any, words: str) -> None:
        message = fault({"wire": {"half": half}})
        assert message.startswith("wire.half: ")
        assert message.count("wire.half") == 1
        assert words in message
        assert validate({"wire": {"half": ["lora", "head"]}}).wire.half == ["lora", "head"]

    def test_noise_needs_a_clip(self) -> None:
        assert "needs privacy.clip" in fault({"privacy": {"noise_multiplier": 1}})

    @pytest.mark.parametrize("value", [1e-160, 9e-7, 1.1e6, 1e160])
    @pytest.mark.parametrize("key", ["noise_multiplier", "clip"])
    def test_absurd_noise_is_refused(self, key: str, value: float) -> None:
        """Float32 would round it away, or the accountant could not compute with it."""
        noise = {"noise_multiplier": 1.0, "clip": 1.0, key: value}
        expected = f"privacy.{key} is {value:g}: expected 0, or 1e-06 to 1e+06"
        assert expected in fault({"privacy": noise})

    def test_a_run_that_began_with_such_noise_goes_on(self) -> None:
        noise = "[privacy]\nnoise_multiplier = 1e-7\nclip = 2e6\n"
        assert parse(noise).privacy.clip == 2e6

    @pytest.mark.parametrize("value", [1e-6, 1e6])
    def test_the_least_and_the_most_noise_are_taken(self, value: float) -> None:
        noise = {"noise_multiplier": value, "clip": value}
        assert validate({"privacy": noise}).privacy.terms.noise_multiplier == value
        validate({"privacy": {"noise_multiplier": 1, "clip": 2}})

    @pytest.mark.parametrize(("key", "value"), [("clip", 1), ("max_epsilon", 1), ("partial", True)])
    def test_a_term_that_does_nothing_without_noise_is_told(self, key: str, value: Any) -> None:
        assert f"privacy.{key} does nothing" in fault({"privacy": {key: value}})

    def test_clients_are_told_the_terms_of_privacy_and_nothing_else(self) -> None:
        given = {"noise_multiplier": 1, "clip": 2, "delta": 1e-6, "max_epsilon": 3, "min_count": 4,
                 "partial": True, "secure": "masks", "secure_threshold": 0.75,
                 "secure_min_clients": 4, "relay_sums": False}  # fmt: skip
        rounds = {"min_clients": 4}
        section = {**given, "evaluate_min_count": 5}
        told = validate({"privacy": section, "round": rounds}).privacy.terms
        assert told.model_dump() == given
        assert validate({}).privacy.terms == NO_PRIVACY

    @pytest.mark.parametrize(
        ("section", "values", "words"),
        [
            ("round", {"mode": "async", "take": 3}, "round.mode is 'async'"),
            ("round", {"take": 3}, "round.take is 3"),
            ("round", {"min_clients": 2}, "round.min_clients is 2"),
            ("trust", {"averaging": "median"}, "trust.averaging is 'median'"),
            ("trust", {"max_weight_share": 0.3}, "trust.max_weight_share is 0.3"),
            ("trust", {"outlier_factor": 3}, "trust.outlier_factor is 3"),
            ("run", {"keep_updates": True}, "run.keep_updates"),
        ],
    )
    def test_masks_hide_what_a_setting_needs(
        self, section: str, values: dict[str, Any], words: str
    ) -> None:
        given = {"round": {"min_clients": 3}, "privacy": {"secure": "masks"}}
        validate(given)
        validate({**given, "trust": {"max_weight_share": 1, "outlier_factor": 0}})
        assert words in fault({**given, section: {**given.get(section, {}), **values}})

    @pytest.mark.parametrize(
        ("section", "values", "words"),
        [
            ("round", {"mode": "async", "take": 3}, "round.mode is 'async'"),
            ("trust", {"averaging": "median"}, "trust.averaging is 'median'"),
            ("trust", {"max_weight_share": 0.3}, "trust.max_weight_share is 0.3"),
            ("trust", {"outlier_factor": 3}, "trust.outlier_factor is 3"),
            ("run", {"keep_updates": True}, "run.keep_updates"),
            ("privacy", {"secure": "masks"}, "hides them from all"),
            ("privacy", {"noise_multiplier": 1, "clip": 2}, "without noise only"),
        ],
    )
    def test_sums_of_relays_hide_what_a_setting_needs(
        self, section: str, values: dict[str, Any], words: str
    ) -> None:
        given = {"round": {"min_clients": 3}, "privacy": {"relay_sums": True}}
        assert validate({**given, "round": {"take": 3}}).privacy.terms.relay_sums
        assert words in fault({**given, section: {**given.get(section, {}), **values}})

    def test_numbers_of_masks_do_nothing_without_them(self) -> None:
        assert "does nothing while privacy.secure is 'off'" in fault(
            {"privacy": {"secure_min_clients": 4}}
        )

    def test_several_of_these_are_told_at_once(self) -> None:
        message = fault(
            {
                "tasks": {"schedule": "listed"},
                "round": {"clients_per_round": 1, "quorum": 2},
                "federation": {"listen": ":1"},
            }
        )
        assert message.count(";") == 2


class TestAddresses:
    @pytest.mark.parametrize(
        ("address", "expected"),
        [
            ("127.0.0.1:7710", ("127.0.0.1", 7710)),
            ("host.example:0", ("host.example", 0)),
            ("[::1]:7710", ("::1", 7710)),
            ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
        ],
    )
    def test_host_and_port(self, address: str, expected: tuple[str, int]) -> None:
        assert split_address(address) == expected

    @pytest.mark.parametrize(
        "address",
        ["", ":", "host", "host:", ":7710", "[]:1", "host:x", "host:-1", "host:65536", "host:1.5",
         "host:" + "9" * 5000, "host: 1"],
    )  # fmt: skip
    def test_anything_else_is_refused_in_a_sentence(self, address: str) -> None:
        with pytest.raises(ConfigError, match="HOST:PORT"):
            split_address(address)

    @pytest.mark.parametrize("override", ["listen='host:99999'", "advertise=['host:99999']"])
    def test_the_key_and_the_ports_are_named(self, override: str) -> None:
        words = f"federation.{override.partition('=')[0]}: address 'host:99999' .* 0 to 65535"
        with pytest.raises(ConfigError, match=words):
            load(None, [f"federation.{override}"])


class TestOverrides:
    @pytest.mark.parametrize(
        ("override", "value"),
        [
            ("round.min_clients=3", ("round", "min_clients", 3)),
            (" round.min_clients = 3 ", ("round", "min_clients", 3)),
            ("run.evaluate=false", ("run", "evaluate", False)),
            ("round.deadline_s=1.5", ("round", "deadline_s", 1.5)),
            ("method.name=running_mean", ("method", "name", "running_mean")),
            ('method.name="running_mean"', ("method", "name", "running_mean")),
            ("federation.name=a=b", ("federation", "name", "a=b")),
            ("federation.name=", ("federation", "name", "")),
            ('federation.advertise=["a:1", "b:2"]', ("federation", "advertise", ["a:1", "b:2"])),
        ],
    )
    def test_one_value(self, override: str, value: tuple[str, str, Any]) -> None:
        section, key, expected = value
        assert getattr(getattr(load(None, [override]), section), key) == expected

    def test_a_method_option_may_have_a_section_of_its_own(self) -> None:
        assert load(None, ["method.lora.rank=4"]).method.options == {"lora": {"rank": 4}}

    def test_they_win_over_the_file_and_the_last_wins(self, file: Path) -> None:
        file.write_text("[round]\nmin_clients = 7\nquorum = 5\n")
        config = load(file, ["round.min_clients=3", "round.min_clients=4"])
        assert (config.round.min_clients, config.round.quorum) == (4, 5)

    @pytest.mark.parametrize(
        "override", ["", "=", "round", "round=3", "min_clients=3", ".x=1", "round.=1", "a..b=1"]
    )
    def test_a_form_that_is_no_override_is_told_with_an_example(self, override: str) -> None:
        with pytest.raises(ConfigError, match=r"section\.key=value") as error:
            load(None, [override])
        assert "-c round.min_clients=3" in error.value.action

    @pytest.mark.parametrize("override", ["round.min_clients.x=1", "run.seed.x=1"])
    def test_a_key_below_a_value_is_told(self, file: Path, override: str) -> None:
        file.write_text("[round]\nmin_clients = 7\n[run]\nseed = 1\n")
        with pytest.raises(ConfigError, match="is not a section"):
            load(file, [override])

    def test_they_are_checked_like_the_file(self) -> None:
        with pytest.raises(ConfigError, match=r"min_cleints.*did you mean"):
            load(None, ["round.min_cleints=3"])


class TestWriting:
    @pytest.mark.parametrize("comments", [False, True])
    def test_the_defaults_come_back_from_toml(self, comments: bool) -> None:
        assert parse(to_toml(Config(), comments=comments)) == Config()

    def test_every_key_is_written_and_its_meaning_with_it(self) -> None:
        text = to_toml(Config(), comments=True)
        fields = tomllib.loads(text)
        written = {f"{s}.{k}" for s, keys in fields.items() for k in keys}
        assert written == {key for key in known_keys() if "." in key}
        for line in text.splitlines():
            undescribed = not line or line.startswith(("[", 'name = "pilora"'))
            assert undescribed or "  # " in line, line

    def test_a_snapshot_of_anything_set_comes_back(self) -> None:
        config = validate(
            {
                "federation": {"name": 'quote " back\\slash \x7f\n tab\t 🐕', "advertise": ["a:1"]},
                "tasks": {"schedule": "listed", "classes": [["cat", "Käse"], ["dog"]]},
                "method": {
                    "name": "third",
                    "rate": 1e-5,
                    "huge": 1e22,
                    "on": True,
                    "steps": [1, 2],
                    "nested": {"a b": {"deep": "x"}, "ä": []},
                    "odd key": 1,
                },
                "round": {"deadline_s": 0.1},
            }
        )
        assert parse(to_toml(config)) == config

    @settings(max_examples=100)
    @given(
        st.text(max_size=30),
        st.dictionaries(
            st.text(max_size=5),
            st.floats(allow_nan=False)
            | st.text(max_size=5)
            | st.booleans()
            | st.integers(-(2**60), 2**60),
            max_size=3,
        ),
    )
    def test_fuzz_any_text_and_any_option_come_back(
        self, name: str, options: dict[str, Any]
    ) -> None:
        """Tags and other characters beyond the first plane too: they have eight digits."""
        config = validate({"federation": {"name": name}, "method": {**options, "name": "m"}})
        assert parse(to_toml(config)) == config

    def test_a_character_that_is_not_shown_and_has_eight_digits(self) -> None:
        config = validate({"federation": {"name": "\U000e0041x"}})
        assert parse(to_toml(config)).federation.name == "\U000e0041x"

    def test_a_value_that_toml_cannot_hold_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="as TOML"):
            to_toml(validate({"method": {"when": object()}}))


def test_where_a_server_listens_is_said_beside_what_it_advertises() -> None:
    own = FederationSection(listen="0.0.0.0:7710")
    assert own.describe_doors(7711) == "0.0.0.0:7711"
    named = FederationSection(listen="[::1]:7710", advertise=["lab.example:443", "10.0.0.2:7710"])
    assert named.describe_doors(7710) == (
        "[::1]:7710; advertised as lab.example:443, 10.0.0.2:7710"
    )
