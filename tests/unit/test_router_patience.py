"""How long a router waits before it asks for frames."""

from services.router.core.patience import GAP_S, LONGEST_S, SILENCE_S, Patience


def test_silence_is_asked_about_less_and_less_often_until_there_is_news() -> None:
    """Each question without news doubles the wait up to a bound; news brings it back; a gap is asked about sooner."""
    patience = Patience()
    waits = []
    for _ in range(12):
        waits.append(patience.wait_s(gap=False))
        patience.asked()
    assert waits == [SILENCE_S, 2 * SILENCE_S, 4 * SILENCE_S, *[LONGEST_S] * 9]
    patience.heard()
    assert (patience.wait_s(gap=False), patience.wait_s(gap=True)) == (SILENCE_S, GAP_S)
    patience.asked()
    assert patience.wait_s(gap=True) == 2 * GAP_S
