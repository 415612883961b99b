"""Transfers cut into parts: every byte of every block is in one part, and no part outgrows its staging buffer."""

from hypothesis import given, settings
from hypothesis import strategies as st

from terracekv.kernels.parts import Cut
from terracekv.kernels.runs import Runs


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Cut, list[Runs], int]:
    sizes = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=3))
    pieces = [Runs(tuple(range(0, bases * run, run)), 1000, 8, run) for bases, run in sizes]
    pages = draw(st.integers(1, 4))
    return Cut(pieces, pages, draw(st.integers(1, 900))), pieces, pages


@settings(deadline=None)
@given(cuts(), st.integers(0, 7))
def test_every_byte_of_every_block_is_moved_once(drawn: tuple[Cut, list[Runs], int], block_count: int) -> None:
    cut, pieces, pages = drawn
    seen = [bytearray(cut.block_bytes) for _ in range(block_count)]
    bases = [[0] * len(piece.bases) for piece in pieces for _ in range(block_count)]
    for part in cut.parts(block_count):
        assert part.size * part.block_count <= cut.part_bytes
        assert sum(stripe.base_count * cut.shares[stripe.piece] for stripe in part.stripes) == part.size
        for block in range(part.first_block, part.first_block + part.block_count):
            for byte in range(part.offset, part.offset + part.size):
                seen[block][byte] += 1
            for stripe in part.stripes:
                before = sum(len(pieces[n].bases) * cut.shares[n] for n in range(stripe.piece))
                assert part.offset + stripe.offset == before + stripe.first_base * cut.shares[stripe.piece]
                for base in range(stripe.first_base, stripe.first_base + stripe.base_count):
                    bases[stripe.piece * block_count + block][base] += 1
    assert all(set(block) == {1} for block in seen)
    assert all(set(counts) == {1} for counts in bases)


@settings(deadline=None)
@given(cuts(), st.integers(1, 7))
def test_parts_of_a_block_follow_each_other(drawn: tuple[Cut, list[Runs], int], block_count: int) -> None:
    parts = drawn[0].parts(block_count)
    order = [(part.first_block, part.offset) for part in parts]
    assert order == sorted(order)
    assert parts[0].first_block == 0 and parts[-1].first_block + parts[-1].block_count == block_count
