"""The ledger of leases: whoever comes, goes and answers twice, each group is answered once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentrl.players.leases import Lease, LeaseBook


def add(book: LeaseBook, count: int) -> None:
    for number in range(count):
        book.add(Lease(number, 0, 4, {}, 0.0))


def lend_next(book: LeaseBook, player: int) -> int | None:
    lease = book.peek()
    if lease is None:
        return None
    book.lend(lease, player)
    return lease.number


@given(
    st.lists(st.tuples(st.sampled_from(["lend", "answer", "lose", "cancel", "end"]), st.integers(0, 3)), max_size=80)
)
def test_each_group_is_answered_once_and_none_is_forgotten(moves: list[tuple[str, int]]) -> None:
    book, answered, cancelled = LeaseBook(), [], set()
    held: dict[int, set[int]] = {player: set() for player in range(4)}
    lent: list[tuple[int, int]] = []  # all that ever was, which may be answered late
    add(book, 12)
    for move, player in moves:
        if move == "lend" and (number := lend_next(book, player)) is not None:
            held[player].add(number)
            lent.append((number, player))
        elif move == "answer" and lent:
            number, by = lent[player % len(lent)]
            if book.answer(number, by):
                answered.append(number)
                assert number in held[by]
                held[by].discard(number)
        elif move == "lose":
            assert {lease.number for lease in book.give_back(player)} == held[player]
            held[player].clear()
        elif move == "cancel" and held[player]:
            number = min(held[player])
            assert book.remove(number) == player
            held[player].discard(number)
            cancelled.add(number)
        elif move == "end" and held[player]:
            book.note_ended(min(held[player]), player, 3)
        for one, numbers in held.items():
            assert book.count_episodes(one) == sum(4 - book.leases[n].ended for n in numbers)
    assert len(answered) == len(set(answered))
    assert set(answered) | cancelled | set(book.leases) == set(range(12))
    for player in range(4):
        book.give_back(player)
    rest = []
    while (number := lend_next(book, 9)) is not None:
        assert book.answer(number, 9)
        rest.append(number)
    assert rest == sorted(rest)
    assert sorted([*answered, *cancelled, *rest]) == list(range(12))


def test_what_a_lost_player_had_comes_first_again() -> None:
    book = LeaseBook()
    add(book, 4)
    assert [lend_next(book, 1), lend_next(book, 1), lend_next(book, 2)] == [0, 1, 2]
    book.give_back(1)
    assert [lend_next(book, 2) for _ in range(4)] == [0, 1, 3, None]
    assert not book.answer(0, 1)
    assert book.dropped == 1
    assert book.answer(0, 2)


def test_losses_of_a_group_are_counted_and_players_that_leave_in_order_are_none() -> None:
    book = LeaseBook()
    add(book, 1)
    for player, lost in enumerate((True, False, True)):
        assert lend_next(book, player) == 0
        (lease,) = book.give_back(player, lost=lost)
    assert lease.returned == 2


def test_a_players_groups_are_counted_with_the_oldest() -> None:
    book = LeaseBook()
    for number in range(3):
        book.add(Lease(number, 0, 4, {}, since=0.0))
    assert book.count_groups(1) == (0, 0.0)
    for now in (7.0, 9.0, 8.0):
        lease = book.peek()
        assert lease is not None
        book.lend(lease, 1, now)
    assert book.count_groups(1) == (3, 7.0)
    assert book.answer(0, 1)
    assert book.count_groups(1) == (2, 8.0)
    book.give_back(1)
    assert book.count_groups(1) == (0, 0.0)
