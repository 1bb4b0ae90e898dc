"""BatchBuilder: the scheduler's step as flat arrays."""

from ingot.runtime.kv.blocks import BlockManager
from ingot.runtime.scheduling.batch_builder import BatchBuilder
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.sequence import Sequence


def test_a_decode_and_two_chunks_are_concatenated() -> None:
    blocks = BlockManager(16, 4)
    scheduler = Scheduler(blocks, max_batch_tokens=8, max_sequences=4)
    builder = BatchBuilder(blocks, max_batch_tokens=8, max_sequences=4)
    first, second, third = (Sequence.of(n, [n * 10 + i for i in range(5 - n)], 4) for n in range(3))
    scheduler.add(first)
    scheduler.complete(scheduler.schedule())
    first.tokens.append(99)
    scheduler.add(second)
    scheduler.add(third)
    scheduled = scheduler.schedule()
    batch = builder.build(scheduled)
    assert batch.input_ids.tolist() == [99, 10, 11, 12, 13, 20, 21, 22]
    assert batch.position_ids.tolist() == [5, 0, 1, 2, 3, 0, 1, 2]
    assert batch.logits_indices.tolist() == [0, 4, 7]
    assert batch.query_starts.tolist() == [0, 1, 5, 8]
    assert batch.context_lens.tolist() == [6, 4, 3]
    assert [[b for b in row if b >= 0] for row in batch.block_tables.tolist()] == [
        blocks.table(each.id).tolist() for each in (first, second, third)
    ]
    first.tokens.append(7)  # numpy holds no buffer of the array


def test_a_prompt_whose_logits_are_read_gets_them_for_each_token_of_its_chunk() -> None:
    blocks = BlockManager(16, 4)
    scheduler = Scheduler(blocks, max_batch_tokens=8, max_sequences=4)
    builder = BatchBuilder(blocks, max_batch_tokens=8, max_sequences=4)
    scheduler.add(Sequence.of(0, range(3), 4))
    scheduler.add(Sequence.of(1, range(9), 4, reuse_prefix=False))
    batch = builder.build(scheduler.schedule())
    assert batch.query_starts.tolist() == [0, 3, 8]
    assert batch.logits_indices.tolist() == [2, 3, 4, 5, 6, 7]


def test_a_chunk_in_the_middle_of_a_prompt_gets_no_logits() -> None:
    blocks = BlockManager(16, 4)
    scheduler = Scheduler(blocks, max_batch_tokens=4, max_sequences=1)
    builder = BatchBuilder(blocks, max_batch_tokens=4, max_sequences=1)
    scheduler.add(Sequence.of(0, range(9), 2))
    for expected in ([0, 1, 2, 3], [4, 5, 6, 7]):
        scheduled = scheduler.schedule()
        batch = builder.build(scheduled)
        assert batch.input_ids.tolist() == batch.position_ids.tolist() == expected
        assert batch.logits_indices.tolist() == []
        scheduler.complete(scheduled)


def test_a_token_in_flight_is_carried_by_its_row_in_the_previous_step() -> None:
    blocks = BlockManager(16, 4)
    scheduler = Scheduler(blocks, max_batch_tokens=8, max_sequences=4)
    builder = BatchBuilder(blocks, max_batch_tokens=8, max_sequences=4)
    first, second, third = (Sequence.of(n, [9] * (n + 2), 4) for n in range(3))
    scheduler.add(first)
    scheduler.add(second)
    scheduler.queue(scheduler.schedule())
    first.num_in_flight -= 1  # read, while the second one's token is still in flight
    first.tokens.append(7)
    scheduler.add(third)
    scheduled = scheduler.schedule()
    batch = builder.build(scheduled)
    assert batch.input_ids.tolist() == [7, 0, 9, 9, 9, 9]
    assert batch.position_ids.tolist() == [2, 3, 0, 1, 2, 3]
    assert builder.carried(scheduled, {second.id: 5}).tolist() == [-1, 5, -1, -1, -1, -1]
