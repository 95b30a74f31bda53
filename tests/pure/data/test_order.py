"""The order of samples: every sample once per epoch, the same for every layout, the same after a restart."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.order import in_order, permute, sample_ids

seeds = st.integers(0, 2**63)


@given(num_samples=st.integers(1, 3000), seed=seeds, epoch=st.integers(0, 10**6))
def test_an_epoch_is_a_permutation(num_samples: int, seed: int, epoch: int):
    ids = permute(np.arange(num_samples), num_samples, seed, epoch)
    assert sorted(ids.tolist()) == list(range(num_samples))


@given(num_samples=st.integers(2**40, 2**62), seed=seeds, start=st.integers(0, 2**40 - 64))
def test_a_huge_epoch_costs_no_memory_and_repeats_nothing(num_samples: int, seed: int, start: int):
    ids = permute(np.arange(start, start + 64), num_samples, seed, 0)
    assert len(set(ids.tolist())) == 64
    assert ids.min() >= 0 and ids.max() < num_samples


@given(num_samples=st.integers(1, 200), global_batch=st.integers(1, 64), seed=seeds)
def test_each_epoch_of_a_run_holds_every_sample_once(num_samples: int, global_batch: int, seed: int):
    num_steps = -(-3 * num_samples // global_batch)
    run = np.concatenate([sample_ids(seed, step, global_batch, num_samples) for step in range(num_steps)])
    for epoch in range(3):
        ids = run[epoch * num_samples : (epoch + 1) * num_samples]
        assert sorted(ids.tolist()) == list(range(num_samples))


def test_a_resumed_run_sees_what_the_uninterrupted_one_does():
    # 64 samples, global batch 4, stopped after step 5, resumed to step 16 and into the second epoch.
    whole = [sample_ids(7, step, 4, 64).tolist() for step in range(32)]
    resumed = [sample_ids(7, step, 4, 64).tolist() for step in range(5, 32)]
    assert whole[5:] == resumed
    for epoch in (whole[:16], whole[16:]):
        assert sorted(itertools.chain(*epoch)) == list(range(64))
    assert whole[:16] != whole[16:]


def test_the_order_never_changes_between_releases_golden():
    # Source: this implementation, first release; a change would make every resumed run see other data.
    assert sample_ids(1, 0, 12, 10).tolist() == [4, 2, 6, 0, 3, 1, 8, 5, 7, 9, 9, 0]
    assert sample_ids(2026, 10**7, 4, 10**12).tolist() == [465099540239, 764883768273, 763247891169, 19989753066]


def test_seeds_and_epochs_give_orders_of_their_own():
    orders = {tuple(permute(np.arange(50), 50, seed, epoch).tolist()) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_sets_of_one_size_have_orders_of_their_own():
    """Were they read in one order, a mixture would meet the same places of all its sets together."""
    orders = {tuple(in_order(np.arange(50), 50, 7, stream).tolist()) for stream in range(20)}
    assert len(orders) == 20 and all(sorted(order) == list(range(50)) for order in orders)
    assert in_order(np.arange(50), 50, 7).tolist() == sample_ids(7, 0, 50, 50).tolist(), "a lone set is stream 0"


def test_every_place_is_as_likely_as_every_other():
    # 4,000 epochs of 10 samples: each (place, sample) pair is expected 400 times, standard deviation 19.
    counts = np.zeros((10, 10), dtype=int)
    for epoch in range(4000):
        counts[np.arange(10), permute(np.arange(10), 10, 3, epoch)] += 1
    assert abs(counts - 400).max() < 5 * 19


def test_neighbours_do_not_stay_neighbours():
    ids = permute(np.arange(10_000), 10_000, 5, 0)
    correlation = np.corrcoef(ids[:-1], ids[1:])[0, 1]
    assert abs(correlation) < 0.05
    assert np.count_nonzero(abs(np.diff(ids)) == 1) < 12  # 2 are expected
