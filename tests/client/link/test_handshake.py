"""What a client says of itself."""

from importlib.metadata import EntryPoint, EntryPoints

from fcil_adapters.contract import registry
from fcil_client.link.handshake import installed_methods


def test_all_methods_are_named_after_one_look_at_the_packages_and_a_broken_one_is_told(monkeypatch):
    good = registry.installed().select(name="running_mean")
    broken = EntryPoint("broken", "no.such.module:METHOD", registry.GROUP)
    looks = []

    def look(*, group):
        looks.append(group)
        return EntryPoints([broken, *good])

    monkeypatch.setattr(registry, "entry_points", look)
    found, faults = installed_methods()
    assert [f.partition("==")[0] for f in found] == ["running_mean"]
    assert ["'broken'" in fault for fault in faults] == [True]
    assert looks == [registry.GROUP]
