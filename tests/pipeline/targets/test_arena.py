"""Plans of the arena: no overlap within a lifetime, and close to the lower bound."""

from hypothesis import given
from hypothesis import strategies as st

from ingot.pipeline.targets.arena import ALIGNMENT, Lifetime, arena_bytes, lifetimes, plan_arena
from ingot.sizes import round_up
from tests.pipeline.targets.arena_bounds import least_bytes

LIFETIMES = st.builds(
    lambda size, first, length: Lifetime(size, first, first + length),
    st.integers(1, 5000),
    st.integers(0, 30),
    st.integers(0, 12),
)


def test_a_lifetime_reaches_from_the_first_use_to_the_last() -> None:
    found = lifetimes([["a"], ["a", "b"], ["b", "weights"], ["a"]], {"a": 10, "b": 20, "unused": 5})
    assert found == {"a": Lifetime(10, 0, 3), "b": Lifetime(20, 1, 2)}


def test_buffers_of_different_lifetimes_share_memory() -> None:
    chain = {name: Lifetime(1000, at, at + 1) for at, name in enumerate("abcdef")}
    offsets = plan_arena(chain)
    assert arena_bytes(chain, offsets) == least_bytes(chain) == 2 * 1024


@given(st.dictionaries(st.text("abcdefgh", min_size=1, max_size=3), LIFETIMES, max_size=25))
def test_buffers_alive_at_one_step_never_overlap(buffers: dict[str, Lifetime]) -> None:
    offsets = plan_arena(buffers)
    assert offsets.keys() == buffers.keys()
    for name, one in buffers.items():
        assert offsets[name] % ALIGNMENT == 0
        for other, two in buffers.items():
            if name < other and one.overlaps(two):
                apart = offsets[name] + one.bytes <= offsets[other] or offsets[other] + two.bytes <= offsets[name]
                assert apart
    assert (
        least_bytes(buffers) <= arena_bytes(buffers, offsets) <= sum(round_up(b.bytes, 256) for b in buffers.values())
    )
