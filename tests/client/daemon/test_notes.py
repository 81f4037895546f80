"""What a peer can cause at will is told now and then, and its number is exact."""

from fcil_client.notes import AT_ONCE, EACH_S, KEPT, Notes


def test_what_comes_a_thousand_times_is_told_a_few_times_with_its_number():
    made, now = [], [100.0]
    notes = Notes(made.append, clock=lambda: now[0])
    for number in range(1000):
        notes.now_and_then("refused", "warning", f"refused: {number}")
    assert [n.text for n in made] == [f"refused: {n}" for n in range(AT_ONCE)]
    notes.now_and_then("other", "error", "another topic")
    assert made.pop().text == "another topic"
    now[0] += EACH_S
    for _ in range(2):
        notes.now_and_then("refused", "warning", "refused: late")
    more = 1000 - AT_ONCE
    assert made[-1].text == f"refused: late ({more} more since the last of these lines)"
    assert len(made) == AT_ONCE + 1
    now[0] += 1000 * EACH_S
    for _ in range(2 * AT_ONCE):
        notes.now_and_then("refused", "warning", "refused: again")
    assert len(made) == 2 * AT_ONCE + 1
    assert made[-AT_ONCE].text == "refused: again (1 more since the last of these lines)"
    assert len(made) < KEPT
